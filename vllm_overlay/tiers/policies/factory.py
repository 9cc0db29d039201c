# SPDX-License-Identifier: Apache-2.0
"""Where an eviction policy is registered, and how the setting ``eviction_policy`` becomes one."""

from typing import Any

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.settings.registry import Registry
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.guarded import GuardedPolicy
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

AUTO = "auto"
LEARNED = "learned"

POLICIES: Registry[EvictionPolicy[Any]] = Registry(
    "eviction_policy",
    EvictionPolicy,  # type: ignore[type-abstract]
    {
        "lru": "vllm_overlay.tiers.policies.lru:LeastRecentlyUsed",
        LEARNED: "vllm_overlay.tiers.policies.learned:LearnedEviction",
    },
)


def check_policy(name: str) -> None:
    """Raises ConfigError when the setting's value stands for no policy."""
    if name != AUTO:
        POLICIES.find(name)


def learns(name: str) -> bool:
    """Whether a tier with that setting, which knows ``learned``, decides by it."""
    return name in (AUTO, LEARNED)


def make_policy(name: str, geometry: Geometry) -> EvictionPolicy[Any]:
    """A new policy for one tier in memory of that model; one that may fail is guarded. Raises ConfigError."""
    policy = POLICIES.find(LEARNED if name == AUTO else name)()
    if type(policy) is LeastRecentlyUsed:
        return policy
    guarded = GuardedPolicy(policy)
    guarded.serve(geometry)
    return guarded
