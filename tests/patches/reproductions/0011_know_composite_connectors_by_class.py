# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MultiConnector over a child loaded by module path that reports stats; a composite of another name."""

from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tests.patches.lab import Lab, StatsConnector, conclude, config, error_of, prompt, same

SYMPTOM = "the engine ends when a child loaded by module path reports stats; hybrid support follows from the name"


class Reporting(StatsConnector):
    """Loaded by module path."""

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return NoMetrics(*arguments)


class NoMetrics(KVConnectorPromMetrics):
    """Takes stats and shows none."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        pass


class Composite(MultiConnector):
    """A composite of another name."""


class OneGroupOnly(KVConnectorBase_V1):
    """A connector that does not support the hybrid KV cache manager; never built."""


def composite(name: str, child: str, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config with one child, defined here."""
    children = [{**config(), "kv_connector": child, "kv_connector_module_path": "__main__"}]
    return {**config(connectors=children), "kv_connector": name, "kv_connector_module_path": None, **extra}


def main() -> None:
    here = {"kv_connector_module_path": "__main__"}
    supported = [
        KVConnectorFactory.supports_hma_config(KVTransferConfig(**composite(name, child, **path)))
        for name, path in (("MultiConnector", {}), ("Composite", here))
        for child in ("Reporting", "OneGroupOnly")
    ]
    lab = Lab(composite("MultiConnector", "Reporting"))
    tokens = prompt(1344, seed=1)
    answers: list[dict[str, Any]] = []

    def twice() -> None:
        answers.append(lab.run(tokens)[0])
        lab.reset()
        answers.append(lab.run(tokens)[0])

    error = error_of(twice)
    symptom = error == "ValueError: Connector 'Reporting' is not registered." and supported == [True, False, True, True]
    healthy = (
        not error
        and supported == [True, False, True, False]
        and same(*answers)
        and answers[1]["cached"] > 1000
        and isinstance(KVConnectorFactory.get_connector_class_by_name("Reporting"), type)
    )
    conclude(symptom, healthy, error=error, supported=supported)


if __name__ == "__main__":
    main()
