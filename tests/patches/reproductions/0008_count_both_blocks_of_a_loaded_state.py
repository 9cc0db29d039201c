# SPDX-License-Identifier: Apache-2.0
"""Synchronous loads while the KV cache is nearly full."""

from tests.patches.lab import Lab, LabConnector, N, conclude, error_of, near, prompt

SYMPTOM = "ValueError: Cannot get 1 free blocks from the pool; the engine is dead"


def main() -> None:
    lab = Lab(num_gpu_blocks_override=24, max_model_len=2048, max_num_batched_tokens=4096)
    prompts = [prompt(N + 10 + seed, seed=seed) for seed in range(6)]
    for tokens in prompts:
        lab.run(tokens)  # alone, and so stored
    LabConnector.answer = lambda *_: (0, False)
    lab.reset()
    computed = lab.run(*prompts)
    LabConnector.answer = None
    LabConnector.asynchronous = False
    lab.reset()
    answers: list[dict] = []
    error = error_of(lambda: answers.extend(lab.run(*prompts)))
    right = [near(one, other) for one, other in zip(answers, computed, strict=False)]
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
