# SPDX-License-Identifier: Apache-2.0
"""For the reproductions: engines without a connector that answer with speculation, held against one without."""

import os
from typing import Any

from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput

from tests.engine.oracle import Oracle
from tests.engine.states import FLOAT32
from tests.patches.lab import error_of

NUM_DRAFTS = 3
MATCH_UNIT = 64
ORACLE = {"method": "custom_class", "model": "tests.engine.oracle.Oracle", "num_speculative_tokens": NUM_DRAFTS}
NEAR = 0.25
"""Steps of several tokens a request round otherwise than those of one. So two tokens that are as good may change
places, and what follows is another answer."""


def engine(model: str | None = None, **arguments: Any) -> LLM:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    defaults: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 2304,
        "enable_prefix_caching": True,
        "prefix_match_unit": MATCH_UNIT,
        "enforce_eager": True,
        **FLOAT32.arguments,
    }
    return LLM(model=model or os.environ["TINY_MODEL"], **defaults | arguments)


def answers(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[CompletionOutput]:
    """One after the other."""
    parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=20)
    return [llm.generate([{"prompt_token_ids": each}], parameters, use_tqdm=False)[0].outputs[0] for each in prompts]


def distance(answer: CompletionOutput, expected: list[int]) -> float:
    """How far the expected token is below the best where an answer first parts from what was expected."""
    assert answer.logprobs is not None
    for token, own, seen in zip(expected, answer.token_ids, answer.logprobs, strict=False):
        if token != own:
            return seen[own].logprob - seen[token].logprob if token in seen else float("inf")
    return 0.0


def speculate(prompts: list[list[int]], num_tokens: int) -> tuple[str, list[float]]:
    """The error that ended an engine with the oracle, and how far its answers are from those of an engine without: cold
    ones, then those of hits in the device cache."""
    plain = [list(answer.token_ids) for answer in answers(engine(), prompts, num_tokens + NUM_DRAFTS)]
    Oracle.known = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    found: list[CompletionOutput] = []

    def run() -> None:
        llm = engine(speculative_config=ORACLE)
        for _ in range(2):
            found.extend(answers(llm, prompts, num_tokens))

    error = error_of(run)
    return error, [distance(*pair) for pair in zip(found, plain * 2, strict=False)]
