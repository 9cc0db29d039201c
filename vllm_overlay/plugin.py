# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``vllm.general_plugins``: makes our connectors known to vLLM by name."""

CONNECTORS = {
    "HybridOffloadConnector": ("vllm_overlay.connector.connector", "HybridOffloadConnector"),
    "WeightedMultiConnector": ("vllm_overlay.multi_connector", "MultiConnector"),
}
"""Name in ``kv_connector`` -> module and class, imported when the name is first used."""


def register() -> None:
    """Called by vLLM in every process, perhaps several times in one; registering again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, (module, cls) in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, cls)
