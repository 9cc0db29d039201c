# SPDX-License-Identifier: Apache-2.0
"""What vLLM's rotary embeddings depend on beside the model's configuration. Runs in the workers, after the model."""

from typing import Any

_OF_THE_CONFIGURATION_ALONE = {
    "BailingMRotaryEmbedding",
    "DeepseekScalingRotaryEmbedding",
    "DeepseekV4ScalingRotaryEmbedding",
    "DualChunkRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "Gemma4RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "Llama4VisionRotaryEmbedding",
    "MRotaryEmbedding",
    "MRotaryEmbeddingInterleaved",
    "NTKScalingRotaryEmbedding",
    "RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
}
"""Classes in which a position's rotation follows from the model's configuration. Other limits only give longer
tables."""

_HOW_IT_IS_COMPUTED = {"training", "use_flashinfer", "use_aiter"}


def rotary_facts() -> list[dict[str, Any]]:
    """The rotary embeddings of this process that the model's configuration alone does not decide, as vLLM made them.

    LongRoPE takes its long factors if ``max_model_len`` is above the trained length. Some models make tables of dynamic
    scaling for ``max_model_len``. A class that nobody has looked at counts as such.

    Called once the model is there. What it computes with is read from the modules, so it need not be worked out a
    second time.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    found = [
        {"class": type(module).__name__, **_values(module)}
        for module in _ROPE_DICT.values()
        if type(module).__name__ not in _OF_THE_CONFIGURATION_ALONE
    ]
    return sorted(found, key=str)


def _values(module: object) -> dict[str, Any]:
    """All plain values that a module was given or has worked out."""
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | list | tuple)
        and not name.startswith("_")
        and name not in _HOW_IT_IS_COMPUTED
    }
