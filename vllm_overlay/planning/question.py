# SPDX-License-Identifier: Apache-2.0
"""What an operator asks, a model and the flags of vLLM's server that decide its blocks, and what vLLM answers."""

from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_overlay.planner.geometry import Group, common_block_size

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


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How vLLM will cut its KV cache: one rank's groups and what decides them. All lengths are in tokens.

    ``block_size`` is vLLM's (unified) N. ``state_dtype`` is empty for a model without recurrent states.
    """

    vllm: str
    """Its version."""
    platform: str
    """Of this vLLM: ``cpu``, ``cuda``."""
    groups: tuple[Group, ...]
    block_size: int
    dtype: str
    state_dtype: str
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def has_states(self) -> bool:
        return any(not group.is_attention for group in self.groups)

    @property
    def default_match_unit(self) -> int:
        """The match unit that vLLM takes when none is given."""
        return common_block_size(self.groups)

    @property
    def takes_match_unit(self) -> bool:
        """vLLM refuses a match unit below the block size when there is a single group."""
        return len(self.groups) > 1


@dataclass(frozen=True, slots=True)
class Answer:
    """Either a layout, or the sentence with which the connector or vLLM refuses to start."""

    layout: EngineLayout | None = None
    refusal: str = ""
