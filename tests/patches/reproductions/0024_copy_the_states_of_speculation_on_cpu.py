# SPDX-License-Identifier: Apache-2.0
"""Answers with speculation, of a hybrid model on a CPU with a prefix cache, which run over a block's end."""

from tests.patches.lab import N, conclude, prompt
from tests.patches.speculation import NEAR, speculate

SYMPTOM = "'function' object is not subscriptable: the first step ends the engine"


def main() -> None:
    error, far = speculate([prompt(length, seed=length) for length in (300, N - 3, N - 8, 2 * N - 5)], 24)
    conclude("not subscriptable" in error and not far, not error and max(far) < NEAR, error=error, distances=far)


if __name__ == "__main__":
    main()
