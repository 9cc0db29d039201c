# SPDX-License-Identifier: Apache-2.0
"""A hit inside a block of a model whose groups have two layers each: what of the attention's page is copied."""

import os
import tempfile
from pathlib import Path

from tests.patches.lab import Lab, LabConnector, N, conclude, prompt, same
from tools.tiny_model import make_tiny_model

SYMPTOM = "wrong logprobs after a hit inside a block: the copy ends where a recurrent state would"
HIT = N - 64
"""Tokens. Those near the end of a block lie beyond the bytes of a state."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="model-") as scratch:
        os.environ["TINY_MODEL"] = str(make_tiny_model(Path(scratch) / "tiny", num_layers=8))
        lab = Lab()
    LabConnector.answer = lambda *_: (0, False)
    tokens = prompt(N - 20, seed=1)
    (computed,) = lab.run(tokens)
    lab.reset()
    lab.run(tokens[: HIT + 1], max_tokens=1)  # its last token is never found
    (hit,) = lab.run(tokens)
    is_right = same(hit, computed)
    conclude(
        hit["cached"] == HIT and not is_right,
        hit["cached"] == HIT and is_right,
        cached=hit["cached"],
        logprobs=[computed["logprobs"], hit["logprobs"]],
    )


if __name__ == "__main__":
    main()
