# SPDX-License-Identifier: Apache-2.0
"""Priorities: a prefill whose step is scheduled, and then taken back for a request that is more urgent."""

import os
import tempfile
from pathlib import Path

from tests.models.families import make_qwen3
from tests.patches.lab import Lab, LabConnector, conclude, near, prompt

SYMPTOM = "the blocks of the step that was taken back are hit, and nobody has computed them: wrong tokens"
BLOCK = 32
CHUNK = 4 * BLOCK
LONG = BLOCK + 3 * CHUNK
"""Tokens of the prompt that is not urgent. Its first step has nothing else to do, and takes the whole budget."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="model-") as scratch:
        os.environ["TINY_MODEL"] = str(make_qwen3(Path(scratch) / "tiny"))
        lab = Lab(
            block_size=BLOCK,
            prefix_match_unit=None,
            num_gpu_blocks_override=1
            + LONG // BLOCK
            + 1,  # the null block, and both prompts: there is none for an answer
            max_model_len=LONG + BLOCK,
            max_num_batched_tokens=CHUNK + BLOCK,
            long_prefill_token_threshold=CHUNK,
            scheduling_policy="priority",
            async_scheduling=False,
        )
    LabConnector.answer = lambda *_: (0, False)
    tokens = prompt(LONG, seed=1)
    (alone,) = lab.run(tokens)
    lab.reset()
    lab.start(tokens, priority=1)
    lab.engine.step()
    lab.start(prompt(BLOCK, seed=2))
    while lab.engine.has_unfinished_requests():
        lab.engine.step()
    (later,) = lab.run(tokens)
    is_right = near(later, alone)
    hit = LONG - BLOCK
    conclude(
        later["cached"] == hit and not is_right,
        later["cached"] == hit and is_right,
        cached=later["cached"],
        tokens=[alone["tokens"], later["tokens"]],
    )


if __name__ == "__main__":
    main()
