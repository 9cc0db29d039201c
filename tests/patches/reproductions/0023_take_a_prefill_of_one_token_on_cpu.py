# SPDX-License-Identifier: Apache-2.0
"""A prompt of one token, of a hybrid model on a CPU, without a connector; then a few lengths more, and two at once."""

import os

from tests.patches.lab import N, conclude, error_of, prompt

SYMPTOM = "causal_conv1d_fwd_cpu: a prompt of one token ends the engine"
LENGTHS = (*range(1, 67), N - 1, N, N + 1, 2 * N - 1, 2 * N, 2 * N + 1)


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm = LLM(model=os.environ["TINY_MODEL"], max_model_len=4096, enable_prefix_caching=True, enforce_eager=True)
    requests = [{"prompt_token_ids": prompt(length, seed=1)} for length in LENGTHS]
    alone: list[list[int]] = []
    together: list[list[int]] = []

    def all_lengths() -> None:
        for request in requests:
            alone.extend(list(one.outputs[0].token_ids) for one in llm.generate([request], parameters, use_tqdm=False))
        together.extend(
            list(one.outputs[0].token_ids) for one in llm.generate(requests[:1] * 2, parameters, use_tqdm=False)
        )

    error = error_of(all_lengths)
    conclude(
        "expect x to be transposed" in error and not alone,
        not error and len(alone) == len(LENGTHS) and together == alone[:1] * 2,
        error=error,
        alone=alone,
        together=together,
    )


if __name__ == "__main__":
    main()
