# SPDX-License-Identifier: Apache-2.0
"""The entry point in ``vllm.general_plugins``: makes our connectors known to vLLM by name, and checks settings."""

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
    if hasattr(KVConnectorFactory, "register_check"):  # of the series, which vLLM may not have yet
        from vllm_overlay.settings.early_check import check

        KVConnectorFactory.register_check(check)
