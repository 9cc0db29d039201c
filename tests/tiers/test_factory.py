# SPDX-License-Identifier: Apache-2.0
"""A tier and an eviction policy are found by name or by module path; nothing else of the connector knows them."""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.tiers.store_tier import StoreTierSpec
from vllm_overlay.config import MIB, ConfigError
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.settings.registry import Registry
from vllm_overlay.tiers.base import TierSpec
from vllm_overlay.tiers.factory import TIERS, tier_spec
from vllm_overlay.tiers.policies.factory import POLICIES, make_policy
from vllm_overlay.tiers.policies.guarded import GuardedPolicy
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

BY_PATH = {"tier": "tests.tiers.store_tier:StoreTierSpec", "shelf": "top"}
GEOMETRY = Geometry.build([Group(0, GroupKind.FULL, 64, 10, 640, sliceable=True)], 64, "auto")
PACKAGE = Path(__file__).parents[2] / "vllm_overlay"


def test_a_tier_by_module_path_has_its_own_settings() -> None:
    spec = tier_spec({**BY_PATH, "capacity_bytes": "8 MiB", "name": "mine"})
    assert isinstance(spec, StoreTierSpec)
    assert (spec.settings.shelf, spec.settings.capacity_bytes, spec.settings.name) == ("top", 8 * MIB, "mine")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"root": "/tmp"}, "unknown setting 'root' of the tests.tiers.store_tier:StoreTierSpec tier"),
        ({"shelf": 3}, "shelf=3 of the tests.tiers.store_tier:StoreTierSpec tier must be a string"),
        ({"tier": "tests.tiers.store_tier:Gone"}, "tier='tests.tiers.store_tier:Gone' cannot be imported: module"),
        ({"tier": "tests.tiers.gone:X"}, "tier='tests.tiers.gone:X' cannot be imported: No module named"),
        ({"tier": "tests.tiers.store_tier:StoreManager"}, "is no TierSpec: name a subclass of it"),
        ({"tier": "json:dumps"}, "is no TierSpec"),
        ({"eviction_policy": "tests.tiers.store_tier:StoreTierSpec"}, "is no EvictionPolicy"),
    ],
)
def test_a_tier_that_cannot_be_used_is_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tier_spec({**BY_PATH, **changes})
    assert sentence in str(refusal.value)


def test_a_registered_name_is_the_same_as_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[Any] = Registry("tier", TierSpec, {})  # type: ignore[type-abstract]
    registry.register("store", BY_PATH["tier"])
    registry.register("store", BY_PATH["tier"])  # a plug-in is loaded in every process, perhaps twice
    assert registry.find("store") is StoreTierSpec
    assert registry.names == ("store",)
    with pytest.raises(ConfigError, match="is registered as tests"):
        registry.register("store", "somewhere.else:Tier")


@pytest.mark.parametrize("name", TIERS.names)
def test_every_registered_tier_names_a_source_of_hits_that_vllm_knows(name: str) -> None:
    assert CacheHitSource(TIERS.find(name).hit_source) is not CacheHitSource.EXTERNAL_UNSPECIFIED


class Lifo(LeastRecentlyUsed[Any]):
    """A policy of somebody's own."""


def test_policies_can_be_made_and_all_but_the_very_fallback_are_guarded() -> None:
    own = f"{__name__}:Lifo"
    made = {name: type(make_policy(name, GEOMETRY)) for name in ("auto", *POLICIES.names, own)}
    assert made == {"auto": GuardedPolicy, "lru": LeastRecentlyUsed, "learned": GuardedPolicy, own: GuardedPolicy}


def test_the_disk_tier_refuses_somebodys_own_policy_before_weights_are_read() -> None:
    disk = {"tier": "disk", "root": "/kv"}
    with pytest.raises(ConfigError, match='evict in one order: set it to "learned" or "lru"'):
        tier_spec({**disk, "eviction_policy": f"{__name__}:Lifo"})
    assert tier_spec({**disk, "eviction_policy": "lru"}).settings.eviction_policy == "lru"


def test_no_other_room_asks_which_tier_it_is() -> None:
    rooms = ("connector", "transfer", "multi_connector", "planner")
    sources = {path: path.read_text() for room in rooms for path in (PACKAGE / room).rglob("*.py")}
    assert sources
    words = ("tiers.disk", "tiers.cpu", "DiskTier", "CpuTier", "settings.tier")
    assert [(path.name, word) for path, text in sources.items() for word in words if word in text] == []
