# SPDX-License-Identifier: Apache-2.0
"""A prompt whose last step has one token, with speculation, of a hybrid model on a CPU."""

from tests.patches.lab import conclude, prompt
from tests.patches.speculation import MATCH_UNIT, NEAR, speculate

SYMPTOM = "must be contiguous at last dimension: a prompt of 1 more than the match unit ends the engine"


def main() -> None:
    error, distances = speculate([prompt(MATCH_UNIT + 1, seed=1)], 8)
    conclude(
        "must be contiguous" in error and not distances,
        not error and max(distances) < NEAR,
        error=error,
        distances=distances,
    )


if __name__ == "__main__":
    main()
