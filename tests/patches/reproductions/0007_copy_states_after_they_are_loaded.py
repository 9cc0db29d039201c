# SPDX-License-Identifier: Apache-2.0
"""Synchronous loads that end on a block boundary: the next block starts from a copy of the loaded state."""

from tests.patches.lab import Lab, LabConnector, N, conclude, prompt, same

SYMPTOM = "wrong logprobs after every synchronous load that ends on a block boundary"


def main() -> None:
    lab = Lab()
    prompts = [prompt(N + 1 + 9 * seed, seed=seed) for seed in range(4)] + [prompt(2 * N + 20, seed=9)]
    cold = [lab.run(tokens)[0] for tokens in prompts]
    by_device = lab.run(*prompts)  # the same splits in the same batches
    LabConnector.asynchronous = False
    lab.reset()
    alone = [lab.run(tokens)[0] for tokens in prompts]
    lab.reset()
    together = lab.run(*prompts)
    aligned = {len(key) for key in LabConnector.snapshots} == {N, 2 * N}
    right = [same(one, other, 0.0) for one, other in zip(alone, cold, strict=True)]
    right_together = [same(one, other, 0.0) for one, other in zip(together, by_device, strict=True)]
    loaded = all(answer["cached"] >= N for answer in [*alone, *together, *by_device])
    conclude(
        aligned and loaded and not any(right),
        aligned and loaded and all(right) and all(right_together),
        right=right,
        right_together=right_together,
        attempts=[tokens for _, tokens in LabConnector.attempts],
    )


if __name__ == "__main__":
    main()
