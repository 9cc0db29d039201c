# SPDX-License-Identifier: Apache-2.0
"""Synchronous loads while the KV cache is nearly full."""

from tests.patches.lab import Lab, LabConnector, N, conclude, error_of, prompt, same

SYMPTOM = "ValueError: Cannot get 1 free blocks from the pool; the engine is dead"


def main() -> None:
    lab = Lab(num_gpu_blocks_override=24, max_model_len=2048, max_num_batched_tokens=4096)
    prompts = [prompt(N + 10 + seed, seed=seed) for seed in range(6)]
    cold = [lab.run(tokens)[0] for tokens in prompts]
    LabConnector.asynchronous = False
    lab.reset()
    answers: list[dict] = []
    error = error_of(lambda: answers.extend(lab.run(*prompts)))
    right = [same(one, other, 0.05) for one, other in zip(answers, cold, strict=False)]
    attempts = [tokens for _, tokens in LabConnector.attempts]
    groups = len(lab.scheduler.kv_cache_config.kv_cache_groups)
    conclude(
        "free blocks from the pool" in error,
        not error and len(right) == 6 and all(right) and attempts == [N] * 6,
        error=error,
        right=right,
        attempts=attempts,
        groups=groups,
        blocks=len(lab.scheduler.kv_cache_manager.block_pool.blocks),
    )


if __name__ == "__main__":
    main()
