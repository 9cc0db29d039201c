# SPDX-License-Identifier: Apache-2.0
"""Whether a ``--kv-transfer-config`` would be taken at a start."""

from typing import Any

from vllm.config import KVTransferConfig

from vllm_overlay.multi_connector.children import child_specs
from vllm_overlay.offloading.tier import tier_settings
from vllm_overlay.plugin import SECONDARY_TIER, register
from vllm_overlay.tiers.factory import tier_spec


def accepted_tiers(config: dict[str, Any]) -> list[str]:
    """The tiers of a configuration, after vLLM and our connectors have taken it as at a start.

    Raises what they raise for one that they refuse.
    """
    register()
    taken = KVTransferConfig(**config)
    extra = taken.kv_connector_extra_config
    if taken.kv_connector == "OffloadingConnector":
        behind = [dict(tier) for tier in extra["secondary_tiers"] if tier["type"] == SECONDARY_TIER]
        return [tier_settings(tier, str(tier.pop("type"))).name for tier in behind]
    if taken.kv_connector != "MultiConnector":
        return [tier_spec(extra).settings.tier]
    assert taken.kv_connector_module_path == "vllm_overlay.multi_connector"
    specs = child_specs(extra, kv_role=taken.kv_role, engine_id=None)
    ours = [spec.kv_transfer_config.kv_connector_extra_config for spec in specs if "Hybrid" in spec.cls.__name__]
    return [tier_spec(settings).settings.tier for settings in ours]
