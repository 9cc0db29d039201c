# SPDX-License-Identifier: Apache-2.0
"""What an operator asks: a model, a platform, and the flags of vLLM's server that decide its blocks."""

from typing import Any, Literal

import msgspec

from vllm_overlay.config import ConfigError

Platform = Literal["cpu", "cuda"]
FLAGS = (
    "block_size",
    "max_model_len",
    "tensor_parallel_size",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "prefix_match_unit",
    "max_num_batched_tokens",
    "prefix_caching_hash_algo",
    "prefix_cache_retention_interval",
)
"""Fields that vLLM's ``EngineArgs`` has under the same names; None: not given."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` is a directory or a name in transformers' local cache. Lengths and sizes are in tokens."""

    model: str
    platform: Platform = "cpu"
    block_size: int | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    kv_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    prefix_match_unit: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching_hash_algo: str | None = None
    prefix_cache_retention_interval: int | None = None

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size or 1

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What was given, by the names of ``EngineArgs``."""
        return {name: value for name in FLAGS if (value := getattr(self, name)) is not None}

    @property
    def server_flags(self) -> list[str]:
        """What was given, as arguments of vLLM's server."""
        return [
            word
            for name, value in self.engine_arguments.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]


def check_question(question: Question) -> None:
    """Raises ConfigError for a number that cannot be one of tokens or ranks."""
    for name, value in question.engine_arguments.items():
        least = 0 if name == "prefix_cache_retention_interval" else 1
        if isinstance(value, int) and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be a whole number of at least {least}")
