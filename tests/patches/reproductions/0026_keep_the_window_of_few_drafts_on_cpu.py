# SPDX-License-Identifier: Apache-2.0
"""Answers with a drafter that often proposes fewer than K tokens, of a hybrid model on a CPU."""

from tests.patches.lab import conclude, prompt
from tests.patches.speculation import NEAR, Oracle, speculate

SYMPTOM = "tokens are not those of a run without speculation, or the window has another size than what is kept of it"
ERRORS = ("size of tensor", "num_accepted_tokens must be in")


def main() -> None:
    Oracle.is_short = True
    error, distances = speculate([prompt(length, seed=length) for length in (300, 301, 302, 303)], 24)
    conclude(
        any(words in error for words in ERRORS) or max(distances, default=0.0) > 4 * NEAR,
        not error and max(distances) < NEAR,
        error=error,
        distances=distances,
    )


if __name__ == "__main__":
    main()
