# SPDX-License-Identifier: Apache-2.0
"""A prompt of several steps, with an MTP drafter: which token it is told to come after each."""

import tempfile
from pathlib import Path
from typing import Any

from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from tests.patches.lab import N, conclude, prompt
from tests.patches.speculation import MATCH_UNIT, answers, engine
from tools.tiny_model import make_tiny_model

SYMPTOM = "the prompt's last token follows each of its steps"


def main() -> None:
    followers: list[int] = []
    propose = SpecDecodeBaseProposer.propose

    def record(self: Any, *arguments: Any, **named: Any) -> Any:
        followers.extend(named["next_token_ids"].tolist())
        return propose(self, *arguments, **named)

    SpecDecodeBaseProposer.propose = record
    tokens = prompt(2 * N + 10, seed=1)
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory) / "model", has_draft_head=True)
        llm = engine(
            str(model), max_num_batched_tokens=N, speculative_config={"method": "mtp", "num_speculative_tokens": 2}
        )
        followers.clear()  # those of a start
        answer = answers(llm, [tokens], 1)[0].token_ids
    ends = (N, 2 * N - MATCH_UNIT, 2 * N)
    conclude(
        followers[:3] == [tokens[-1]] * 3,
        followers[:4] == [*(tokens[end] for end in ends), answer[0]],
        followers=followers,
    )


if __name__ == "__main__":
    main()
