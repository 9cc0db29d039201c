# SPDX-License-Identifier: Apache-2.0
"""Requests with MTP whose drafts are all accepted, beside others: alone they say the same, with the same logprobs.

The budget leaves some out of every third step, as a prompt beside them does. Where one has ended, the next one takes
its row, and its prefill goes behind the others.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from tests.engine import asynchronous
from tests.patches.lab import conclude, prompt
from tests.patches.speculation import NEAR, NUM_DRAFTS, engine
from tools.tiny_model import make_tiny_model

SYMPTOM = "logprobs of a state that is some tokens old, after a step without the request or in another row"
TOKEN = 7
BUDGETS = (100, 100, 2 * NUM_DRAFTS + 3)
PROMPTS = {length: prompt(3, seed=length) for length in (20, 33, 27, 40, 64, 50)}
"""By the length of the answer."""


def logprobs(llm: LLM, lengths: list[int]) -> list[list[float]]:
    parameters = [
        SamplingParams(temperature=0, max_tokens=each, ignore_eos=True, logprobs=1, allowed_token_ids=[TOKEN])
        for each in lengths
    ]
    answers = llm.generate([{"prompt_token_ids": PROMPTS[each]} for each in lengths], parameters, use_tqdm=False)
    return [[of[TOKEN].logprob for of in answer.outputs[0].logprobs or []] for answer in answers]


def distances(model: str, *, changes_budget: bool, **arguments: Any) -> list[float]:
    """How far the logprobs of each are from its own alone."""
    llm = engine(
        model, max_num_seqs=4, speculative_config={"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}, **arguments
    )
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    schedule, steps = scheduler.schedule, 0

    def with_budget(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        scheduler.max_num_scheduled_tokens = BUDGETS[steps % len(BUDGETS) if changes_budget else 0]
        return schedule(*arguments)

    scheduler.schedule = with_budget
    alone = [logprobs(llm, [each])[0] for each in PROMPTS]
    together = logprobs(llm, list(PROMPTS))
    return [
        max(abs(one - other) for one, other in zip(*pair, strict=True)) for pair in zip(alone, together, strict=True)
    ]


def main() -> None:
    propose = SpecDecodeBaseProposer.propose

    def know(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        return torch.full_like(propose(self, *arguments, **named), TOKEN)

    SpecDecodeBaseProposer.propose = know
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_tiny_model(Path(directory) / "model", has_draft_head=True))
        left_out = distances(model, changes_budget=True)
        asynchronous.force()
        found = {
            "left out": left_out,
            "moved, asynchronous": distances(model, changes_budget=False),
            "left out, asynchronous": distances(model, changes_budget=True),
            "left out, asynchronous, without a prefix cache": distances(
                model, changes_budget=True, enable_prefix_caching=False, prefix_match_unit=None
            ),
        }
    conclude(
        all(max(far) > 1 for far in found.values()),
        all(max(far) < NEAR for far in found.values()),
        distances=found,
    )


if __name__ == "__main__":
    main()
