# SPDX-License-Identifier: Apache-2.0
"""A prompt whose last step has one token, with speculation, of a hybrid model on a CPU."""

from tests.patches.lab import conclude, prompt
from tests.patches.speculation import MATCH_UNIT, NEAR, speculate

SYMPTOM = "must be contiguous at last dimension: a prompt of 1 more than the match unit ends the engine"


def main() -> None:
    error, far = speculate([prompt(MATCH_UNIT + 1, seed=1)], 8)
    conclude("must be contiguous" in error and not far, not error and max(far) < NEAR, error=error, distances=far)


if __name__ == "__main__":
    main()
