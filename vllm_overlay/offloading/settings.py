# SPDX-License-Identifier: Apache-2.0
"""The settings of a ``hybrid_disk`` tier: those of the disk tier that mean something below vLLM's connector."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_overlay.config import ConfigError
from vllm_overlay.plugin import SECONDARY_TIER
from vllm_overlay.settings.check import checked, refuse_unknown
from vllm_overlay.tiers.disk.settings import DiskTierSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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


def own_tiers(extra_config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries for tiers of ours in an OffloadingConnector's ``kv_connector_extra_config``."""
    entries = extra_config.get("secondary_tiers") or []
    return [entry for entry in entries if isinstance(entry, Mapping) and entry.get("type") == SECONDARY_TIER]


def check_engine(vllm_config: "VllmConfig") -> None:
    """Whether such a tier can tell weights apart there. Raises ConfigError."""
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "a hybrid_disk tier does not tell the weights of drafters apart yet: remove --speculative-config"
        )
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "a hybrid_disk tier cannot tell the weights of LoRA adapters apart, because vLLM names their chunks by the "
            'adapter\'s name: serve without --enable-lora, or use HybridOffloadConnector with "tier": "disk"'
        )


def check_offloading(extra_config: Mapping[str, Any]) -> None:
    """Checks an OffloadingConnector's ``kv_connector_extra_config`` as far as it is about us. Raises ConfigError."""
    own = own_tiers(extra_config)
    if own and extra_config.get("spec_name", _DEFAULT_SPEC) == _DEFAULT_SPEC:
        raise ConfigError(
            f'vLLM does not read secondary_tiers, of which one has "type": "{SECONDARY_TIER}", with its default '
            f'spec_name, {_DEFAULT_SPEC}: write "spec_name": "TieringOffloadingSpec" beside them'
        )
    if len(own) > 1:
        raise ConfigError(f'secondary_tiers has {len(own)} of "type": "{SECONDARY_TIER}": give one of them')
    for entry in own:
        tier_settings({name: value for name, value in entry.items() if name not in _OF_VLLM}, SECONDARY_TIER)
