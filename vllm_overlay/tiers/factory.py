# SPDX-License-Identifier: Apache-2.0
"""Where a tier is registered, and how the setting ``tier`` becomes one.

A tier of somebody else needs no change here: ``"tier": "their.module:TheirSpec"``, or ``TIERS.register`` in a plug-in.
"""

from collections.abc import Mapping
from typing import Any

from vllm_overlay.config import ConfigError, TierSettings, load_weight_of
from vllm_overlay.settings.check import checked
from vllm_overlay.settings.registry import Registry
from vllm_overlay.tiers.base import TierSpec
from vllm_overlay.tiers.policies.factory import check_policy

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
    load_weight_of(extra_config, str(extra_config.get("name") or tier))
    settings = checked(extra_config, cls, f"the {tier} tier")
    settings.name = settings.name or tier
    check_policy(settings.eviction_policy)
    return settings
