# SPDX-License-Identifier: Apache-2.0
"""A Mamba2 model with the prefix cache on, on a CPU, without a connector: one prompt longer than a block, twice."""

import os
import tempfile
from pathlib import Path

from tests.models.families import make_nemotron_h
from tests.patches.lab import conclude, error_of, prompt

SYMPTOM = "IndexError in mamba_mixer2: the first prompt that is longer than a block ends the engine"
NUM_TOKENS = 1500
"""More than two blocks of this model, whose states are float32 on every processor."""


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    request = {"prompt_token_ids": prompt(NUM_TOKENS, seed=1)}
    with tempfile.TemporaryDirectory() as parent:
        llm = LLM(
            model=str(make_nemotron_h(Path(parent) / "model")),
            max_model_len=4096,
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            enforce_eager=True,
        )
        outputs: list = []
        error = error_of(lambda: outputs.extend(llm.generate([request], parameters, use_tqdm=False)[0] for _ in "ab"))
        block_size = llm.llm_engine.vllm_config.cache_config.block_size
    cached = [output.num_cached_tokens for output in outputs]
    equal = len({str(output.outputs[0].logprobs) for output in outputs}) == 1
    conclude(
        "IndexError" in error,
        not error and equal and cached == [0, NUM_TOKENS // block_size * block_size],
        error=error,
        equal=equal,
        cached=cached,
        block_size=block_size,
    )


if __name__ == "__main__":
    main()
