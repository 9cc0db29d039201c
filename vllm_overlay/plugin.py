# SPDX-License-Identifier: Apache-2.0
"""What every process of vLLM runs of ours: the entry point in ``vllm.general_plugins``, and what comes before a
connector is built."""

import functools
import logging

from vllm_overlay.patching import installed

logger = logging.getLogger(__name__)

CONNECTORS = {
    "HybridOffloadConnector": ("vllm_overlay.connector.connector", "HybridOffloadConnector"),
    "WeightedMultiConnector": ("vllm_overlay.multi_connector", "MultiConnector"),
}
"""Name in ``kv_connector`` -> module and class, imported when the name is first used."""

SECONDARY_TIER = "hybrid_disk"
"""``type`` of the disk tier among the ``secondary_tiers`` of vLLM's OffloadingConnector."""


def register() -> None:
    """Entry point ``vllm_overlay``: makes our connectors known by name, and has settings checked early.

    vLLM calls it in every process, perhaps several times in one. A second call changes nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, (module, cls) in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, cls)
    _register_secondary_tier()
    if hasattr(KVConnectorFactory, "register_check"):  # of the series, which vLLM may not have yet
        from vllm_overlay.settings.early_check import check

        KVConnectorFactory.register_check(check)


def _register_secondary_tier() -> None:
    """``"type": "hybrid_disk"`` below vLLM's OffloadingConnector. Its class is one of ours that is vLLM's, but for
    telling such a tier which engine it serves."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ModuleNotFoundError:  # another version of vLLM: who does not ask for a connector of ours is served by it
        return
    if SECONDARY_TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(SECONDARY_TIER, "vllm_overlay.offloading.tier", "HybridDiskTier")
        del KVConnectorFactory._registry["OffloadingConnector"]
        KVConnectorFactory.register_connector(
            "OffloadingConnector", "vllm_overlay.offloading.connector", "OffloadingConnector"
        )


@functools.cache
def prepare_process() -> None:
    """Logs vLLM's version and what is applied; raises UnpatchedError, whose sentence names the command to run."""
    _log_like_vllm()
    logger.info("vllm-overlay: %s", installed.require())


def _log_like_vllm() -> None:
    """vLLM sets up the logger ``vllm`` only; ours gets the same handlers and level."""
    ours, theirs = logging.getLogger("vllm_overlay"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
