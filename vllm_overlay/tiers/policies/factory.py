# SPDX-License-Identifier: Apache-2.0
"""Where an eviction policy is registered, and how the setting ``eviction_policy`` becomes one."""

from typing import Any

from vllm_overlay.registry import Registry
from vllm_overlay.tiers.policies.base import EvictionPolicy

POLICIES: Registry[EvictionPolicy[Any]] = Registry(
    "eviction_policy",
    EvictionPolicy,  # type: ignore[type-abstract]
    {"lru": "vllm_overlay.tiers.policies.lru:LeastRecentlyUsed"},
)


def make_policy(name: str) -> EvictionPolicy[Any]:
    """A new policy for one tier; raises ConfigError."""
    return POLICIES.find(name)()
