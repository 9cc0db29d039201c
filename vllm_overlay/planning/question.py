# SPDX-License-Identifier: Apache-2.0
"""What an operator asks, the arguments of vLLM's server and the tiers, and what vLLM answers."""

from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_overlay.planner.geometry import Group, common_block_size


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is thought of."""

    arguments: tuple[str, ...]
    """As vLLM's own parser will get them, ``--model`` among them."""
    kv_transfer_config: dict[str, Any]
    may_fetch: bool = False
    """Whether a model that is not here may be looked for where vLLM would fetch it from."""


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM's parser read of ``Question.arguments``, and what the plan rests on. None: not given.

    Flags have the names of vLLM's ``EngineArgs``; lengths are in tokens.
    """

    model: str
    prefix_match_unit: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_cache_retention_interval: int | None = None
    enable_prefix_caching: bool | None = None
    shutdown_timeout: int | None = None
    kv_cache_memory_bytes: int | None = None
    """On a CPU also what ``VLLM_CPU_KVCACHE_SPACE`` says, which counts there."""
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    num_engines: int = 1
    """With data parallelism, those on this host. Each has tiers of its own."""


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
    node_bytes: int = 0
    """On a CPU: the memory of a NUMA node, of which each of vLLM's workers takes a share. 0: the device has its own."""
    has_dropping_drafter: bool = False
    """vLLM drops a match unit from each hit, because a drafter reads ahead."""

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
class Reply:
    """What vLLM made of the question."""

    flags: Flags
    layout: EngineLayout


@dataclass(frozen=True, slots=True)
class Answer:
    """Either a reply, or the sentence with which the connector or vLLM refuses to start."""

    reply: Reply | None = None
    refusal: str = ""
