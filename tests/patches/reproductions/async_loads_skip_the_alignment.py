# SPDX-License-Identifier: Apache-2.0
"""Of no patch of ours: vLLM leaves an asynchronous load out of the split at block boundaries, since 0.26."""

from tests.patches.lab import Lab, LabConnector, N, conclude, prompt, same

SYMPTOM = "the asynchronous load of a hybrid model never starts"


def main() -> None:
    lab = Lab()
    tokens = prompt(N + 128, seed=1)
    cold = lab.run(tokens)[0]
    lab.reset()
    restored = lab.run(tokens, max_steps=50)[0]
    started = len(LabConnector.attempts)
    healthy = started == 1 and same(restored, cold) and restored["cached"] == N + 64
    conclude(started == 0 and not restored, healthy, started=started, cached=restored.get("cached"))


if __name__ == "__main__":
    main()
