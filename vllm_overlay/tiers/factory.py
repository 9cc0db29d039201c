# SPDX-License-Identifier: Apache-2.0
"""Where a tier is registered, and how the setting ``tier`` becomes one.

A tier of somebody else needs no change here: ``"tier": "their.module:TheirSpec"``, or ``TIERS.register`` in a plug-in.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_overlay.config import ConfigError, TierSettings, load_weight_of, parse_bytes
from vllm_overlay.registry import Registry
from vllm_overlay.tiers.base import TierSpec
from vllm_overlay.tiers.policies.factory import POLICIES

TIERS: Registry[TierSpec[Any]] = Registry(
    "tier",
    TierSpec,  # type: ignore[type-abstract]
    {"cpu": "vllm_overlay.tiers.cpu:CpuTierSpec", "disk": "vllm_overlay.tiers.disk.spec:DiskTierSpec"},
)


def tier_spec(extra_config: Mapping[str, Any]) -> TierSpec[Any]:
    """The tier of one HybridOffloadConnector, with its checked settings; raises ConfigError."""
    if "tier" not in extra_config:
        known = " or ".join(f'"{name}"' for name in TIERS.names)
        raise ConfigError(f"tier is not set: set kv_connector_extra_config.tier to {known}")
    spec = TIERS.find(extra_config["tier"])
    return spec(_settings(spec.settings_type, extra_config))


def _settings(cls: type[TierSettings], extra_config: Mapping[str, Any]) -> TierSettings:
    tier = extra_config["tier"]
    known = {field.name for field in msgspec.structs.fields(cls)}
    if unknown := sorted(set(extra_config) - known):
        raise ConfigError(f"unknown setting {unknown[0]!r} of the {tier} tier: it takes {', '.join(sorted(known))}")
    load_weight_of(extra_config, str(extra_config.get("name") or tier))
    try:
        settings = msgspec.convert(dict(extra_config), cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{tier} tier: {error}") from error
    settings.name = settings.name or tier
    POLICIES.find(settings.eviction_policy)
    for name in known:
        if name.endswith(("_bytes", "_bytes_per_s")):
            setattr(settings, name, parse_bytes(getattr(settings, name), name))
    return settings
