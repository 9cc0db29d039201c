# SPDX-License-Identifier: Apache-2.0
"""What a connector exports before it has counted anything."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_overlay.common.reasons import FAILED_LOADS
from vllm_overlay.connector.connector import HybridOffloadConnector
from vllm_overlay.metrics import HYBRID_OFFLOAD_COUNTERS

ENGINES = {0: ["m", "0"], 1: ["m", "1"]}


def exported(**settings: Any) -> CollectorRegistry:
    """A front end's registry after vLLM has built the metrics of two engines."""
    registry = CollectorRegistry()
    transfer = SimpleNamespace(kv_connector_extra_config=settings, kv_connector="HybridOffloadConnector")
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    types: Any = {
        kind: lambda kind=kind, **options: kind(**options, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    HybridOffloadConnector.build_prom_metrics(config, types, ["model_name", "engine"], ENGINES)
    return registry


def test_counters_begin_with_0_under_the_connectors_name_in_every_engine() -> None:
    registry = exported(tier="cpu", name="near")
    for model, engine in ENGINES.values():
        labels = {"model_name": model, "engine": engine, "connector": "near"}
        for counter in HYBRID_OFFLOAD_COUNTERS:
            if counter.labels == ("connector",):
                assert registry.get_sample_value(f"{counter.name}_total", labels) == 0
        for reason in FAILED_LOADS:
            found = registry.get_sample_value("vllm:hybrid_offload_failed_loads_total", {**labels, "reason": reason})
            assert found == 0


def test_without_a_name_it_is_the_tiers() -> None:
    labels = {"model_name": "m", "engine": "0", "connector": "cpu"}
    assert exported(tier="cpu").get_sample_value("vllm:hybrid_offload_lookups_total", labels) == 0
