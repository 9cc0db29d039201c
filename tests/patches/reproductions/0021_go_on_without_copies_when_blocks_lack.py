# SPDX-License-Identifier: Apache-2.0
"""Asynchronous loads that end inside a block, of more requests than the KV cache has blocks for."""

from tests.patches.lab import Lab, N, conclude, near, prompt

SYMPTOM = "400 steps after the loads no request has an answer, and none runs"
NUM_BLOCKS = 26
"""Six requests hold a block for each of the four groups, and the null block one: one is left, a request needs three."""


def main() -> None:
    lab = Lab(num_gpu_blocks_override=NUM_BLOCKS, max_model_len=2048)
    prompts = [prompt(N - 1 - seed, seed=seed) for seed in range(8)]
    alone = [lab.run(tokens)[0] for tokens in prompts]
    lab.reset()
    answers = lab.run(*prompts)
    right = [near(one, other, 0.1) for one, other in zip(answers, alone, strict=True)]
    unit = lab.scheduler.hash_block_size
    ends = [(len(tokens) - 1) // unit * unit for tokens in prompts]
    conclude(
        not any(answers),
        all(right) and [answer["cached"] for answer in answers] == ends,
        right=right,
        cached=[answer.get("cached") for answer in answers],
        groups=len(lab.scheduler.kv_cache_config.kv_cache_groups),
    )


if __name__ == "__main__":
    main()
