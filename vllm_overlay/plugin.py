# SPDX-License-Identifier: Apache-2.0
"""Entry points of ``vllm.general_plugins``: make our connectors known to vLLM by name."""

import logging
import os

logger = logging.getLogger(__name__)

CONNECTORS = {
    "HybridOffloadConnector": ("vllm_overlay.connector.connector", "HybridOffloadConnector"),
    "WeightedMultiConnector": ("vllm_overlay.multi_connector", "MultiConnector"),
}
"""Name in ``kv_connector`` -> module and class, imported when the name is first used."""


def register() -> None:
    """Entry point ``vllm_overlay``. vLLM calls it in every process, perhaps several times in one.

    A second call changes nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, (module, cls) in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, cls)


def register_by_former_name() -> None:
    """Entry point ``hybrid_offload``, our name in 0.1.0: an environment's VLLM_PLUGINS may still list only that."""
    register()
    listed = os.environ.get("VLLM_PLUGINS", "").split(",")
    if "hybrid_offload" in listed and "vllm_overlay" not in listed:
        logger.warning("VLLM_PLUGINS lists hybrid_offload: since 0.2.0 that plugin is called vllm_overlay")
