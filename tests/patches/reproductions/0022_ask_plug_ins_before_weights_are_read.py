# SPDX-License-Identifier: Apache-2.0
"""A configuration that a plug-in knows to be wrong; no weight is read, and no connector is built."""

import os
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from tests.patches.lab import conclude, config, error_of

SYMPTOM = "--kv-offloading-size replaces the configured connector, and nobody outside is asked"


def refuse(given: VllmConfig) -> None:
    """As a plug-in's check."""
    size = given.cache_config.kv_offloading_size
    if given.kv_transfer_config.kv_connector == "LabConnector" and size is not None:
        raise ValueError(f"--kv-offloading-size {size:g} beside LabConnector")


def main() -> None:
    if hasattr(KVConnectorFactory, "register_check"):
        KVConnectorFactory.register_check(refuse)
        KVConnectorFactory.register_check(refuse)
    KVConnectorFactory.register_connector("LabConnector", "tests.patches.lab", "LabConnector")
    connectors: list[Any] = []

    def configure(**flags: Any) -> None:
        arguments = EngineArgs(
            model=os.environ["TINY_MODEL"], kv_transfer_config={**config(), "kv_connector_module_path": None}, **flags
        )
        connectors.append(arguments.create_engine_config().kv_transfer_config.kv_connector)

    found = [
        error_of(lambda: configure(kv_offloading_size=1.0)),
        error_of(lambda: configure(kv_offloading_size=1.0, disable_hybrid_kv_cache_manager=False)),
        error_of(configure),
    ]
    asked = ["--kv-offloading-size 1 beside LabConnector" in error for error in found]
    conclude(
        not any(found) and connectors == ["OffloadingConnector", "OffloadingConnector", "LabConnector"],
        asked == [True, True, False] and not found[2] and connectors == ["LabConnector"],
        found=found,
        connectors=connectors,
    )


if __name__ == "__main__":
    main()
