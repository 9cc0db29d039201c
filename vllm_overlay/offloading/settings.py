# SPDX-License-Identifier: Apache-2.0
"""The settings of a ``hybrid_disk`` tier: those of the disk tier that mean something below vLLM's connector."""

from collections.abc import Mapping
from typing import Any

from vllm_overlay.config import ConfigError
from vllm_overlay.plugin import SECONDARY_TIER
from vllm_overlay.settings.check import checked, refuse_unknown
from vllm_overlay.tiers.disk.settings import DiskTierSettings

_SETTINGS = (
    *("root", "capacity_bytes", "min_free_bytes", "max_write_bytes_per_s", "store_on_nth_use", "staging_bytes"),
    *("read_threads", "write_threads", "direct_io", "namespace", "encryption_key_file", "host_name"),
    *("load_timeout_s", "shutdown_timeout_s"),
)
"""Of the disk tier, where vLLM cuts the chunks and picks what to restore."""
_OF_VLLM = ("type", "module_path", "backpressure")
"""What vLLM takes out of an entry of ``secondary_tiers`` before the tier sees it."""
_DEFAULT_SPEC = "CPUOffloadingSpec"


def tier_settings(given: Mapping[str, Any], tier_type: str) -> DiskTierSettings:
    """The checked settings of such a tier. Raises ConfigError."""
    whose = f"the secondary tier {tier_type}"
    refuse_unknown(given, _SETTINGS, whose)
    return checked({**given, "name": tier_type}, DiskTierSettings, whose)


def check_offloading(extra_config: Mapping[str, Any]) -> None:
    """Checks an OffloadingConnector's ``kv_connector_extra_config`` as far as it is about us. Raises ConfigError."""
    entries = extra_config.get("secondary_tiers") or []
    own = [entry for entry in entries if isinstance(entry, Mapping) and entry.get("type") == SECONDARY_TIER]
    if own and extra_config.get("spec_name", _DEFAULT_SPEC) == _DEFAULT_SPEC:
        raise ConfigError(
            f'vLLM does not read secondary_tiers, of which one has "type": "{SECONDARY_TIER}", with its default '
            f'spec_name, {_DEFAULT_SPEC}: write "spec_name": "TieringOffloadingSpec" beside them'
        )
    if len(own) > 1:
        raise ConfigError(f'secondary_tiers has {len(own)} of "type": "{SECONDARY_TIER}": give one of them')
    for entry in own:
        tier_settings({name: value for name, value in entry.items() if name not in _OF_VLLM}, SECONDARY_TIER)
