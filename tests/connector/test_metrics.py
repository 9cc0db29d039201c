# SPDX-License-Identifier: Apache-2.0
"""What a connector exports before it has counted anything, and what it says in vLLM's log line."""

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from tests.connector.harness import Harness
from vllm_overlay.common.reasons import FAILED_LOADS, GROUP_KINDS, LOST_TOKENS, Reason
from vllm_overlay.connector.connector import HybridOffloadConnector
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.metrics import HYBRID_OFFLOAD, Kind, Source
from vllm_overlay.tally import Tally

ENGINES = {0: ["m", "0"], 1: ["m", "1"]}
COUNTERS, HISTOGRAMS, GAUGES = (
    {field: metric for field, metric in HYBRID_OFFLOAD.items() if metric.kind is kind}
    for kind in (Kind.COUNTER, Kind.HISTOGRAM, Kind.GAUGE)
)


def made() -> OffloadStats:
    return OffloadStats("cpu", Tally())


def exported(*payloads: dict[str, Any], **settings: Any) -> CollectorRegistry:
    """A front end's registry after vLLM has built the metrics of two engines, and the first has sent ``payloads``."""
    registry = CollectorRegistry()
    transfer = SimpleNamespace(kv_connector_extra_config=settings, kv_connector="HybridOffloadConnector")
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    types: Any = {
        kind: lambda kind=kind, **options: kind(**options, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    metrics = HybridOffloadConnector.build_prom_metrics(config, types, ["model_name", "engine"], ENGINES)
    assert metrics is not None
    for payload in payloads:
        metrics.observe(payload)
    return registry


def test_counters_begin_with_0_under_the_connectors_name_in_every_engine() -> None:
    registry = exported(tier="cpu", name="near")
    for model, engine in ENGINES.values():
        labels = {"model_name": model, "engine": engine, "connector": "near"}
        for counter in COUNTERS.values():
            if counter.labels == ("connector",):
                assert registry.get_sample_value(f"{counter.name}_total", labels) == 0
        for reason in FAILED_LOADS:
            found = registry.get_sample_value("vllm:hybrid_offload_failed_loads_total", {**labels, "reason": reason})
            assert found == 0
        for reason in LOST_TOKENS:
            why = {"reason": reason.value, "group_kind": GROUP_KINDS.get(reason, "")}
            assert registry.get_sample_value("vllm:hybrid_offload_lost_tokens_total", {**labels, **why}) == 0
        for histogram in HISTOGRAMS.values():
            for source in [{"source": one.value} for one in Source] if "source" in histogram.labels else [{}]:
                assert registry.get_sample_value(f"{histogram.name}_count", {**labels, **source}) == 0


def test_lost_tokens_name_the_kind_of_group_that_lost_them() -> None:
    stats = made()
    for amount, reason in enumerate(LOST_TOKENS, start=1):
        stats.tally.count("lost_tokens", amount, reason)
    registry = exported(stats.to_dict(), tier="cpu")
    found = {
        (sample.labels["reason"], sample.labels["group_kind"])
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:hybrid_offload_lost_tokens_total" and sample.value
    }
    kinds = {reason: kind for reason, kind in found if kind}
    assert kinds == {"attention": "full", "evicted": "full", "state": "recurrent", "window": "sliding"}
    assert {reason for reason, _ in found} == {reason.value for reason in LOST_TOKENS}


def test_observations_of_ranks_and_steps_arrive_in_their_buckets() -> None:
    rank, other, scheduler = (made() for _ in range(3))
    rank.tally.observe("store_seconds", 0.0003)
    for seconds in (0.0003, 0.015, 500.0):
        other.tally.observe("store_seconds", seconds)
    scheduler.tally.observe("first_token_seconds", 1.5, label=Source.TIER)
    both = pickle.loads(pickle.dumps(rank)).aggregate(pickle.loads(pickle.dumps(other)))
    on_the_wire = json.loads(json.dumps(both.aggregate(scheduler).to_dict()))
    registry = exported(on_the_wire, on_the_wire, tier="cpu")
    labels = {"model_name": "m", "engine": "0", "connector": "cpu"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"vllm:hybrid_offload_{name}", {**labels, **more})

    name = "store_seconds"
    assert [value(f"{name}_bucket", le=bound) for bound in ("0.0002", "0.0005", "0.02", "+Inf")] == [0, 4, 6, 8]
    assert value("store_seconds_sum") == pytest.approx(2 * 500.0156)
    assert value("first_token_seconds_bucket", source="tier", le="2.0") == 2
    assert value("first_token_seconds_count", source="computed") == 0


def logged(*reports: OffloadStats) -> list[str]:
    """The lines of one interval of a connector without a MultiConnector."""
    config = KVTransferConfig(
        kv_connector="HybridOffloadConnector",
        kv_connector_module_path="vllm_overlay.connector.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"tier": "cpu"},
    )
    logging, lines = KVConnectorLogging(config), []
    for report in reports:
        logging.observe(report.to_dict())
    logging.log(log_fn=lambda message, *args: lines.append(message % args))
    return lines


def with_gauges() -> OffloadStats:
    stats = made()
    for gauge in GAUGES:
        stats.tally.gauge(gauge, 1 << 20)
    stats.tally.gauge("capacity_bytes", 8 << 20)
    return stats


def test_the_log_line_is_a_few_words() -> None:
    stats = with_gauges()
    for name, amount in {"queried_tokens": 4000, "restored_tokens": 1000, "loaded_bytes": 3 << 29}.items():
        stats.tally.count(name, amount)
    stats.tally.count("stored_bytes", 1000)
    for reason in (Reason.NO_ROOM, Reason.NO_ROOM, Reason.BREAKER):
        stats.tally.count("dropped_stores", label=reason)
    stats.tally.count("failed_loads", label=Reason.CHECKSUM)
    assert logged(stats, with_gauges()) == [
        "KV Transfer metrics: hit=25.0% of 4000 tokens, loaded=1.5 GiB, stored=1000.0 B, dropped stores=3, "
        "failed loads=1, full=12.5%"
    ]


def test_a_tier_with_nothing_to_do_has_no_line() -> None:
    assert logged(with_gauges()) == []
    assert logged(made()) == []


def test_what_has_no_line_is_sent_all_the_same() -> None:
    assert not with_gauges().is_empty()


def test_evictions_are_counted_and_not_a_level() -> None:
    """What goes down with a restart is no gauge: it is sent as what came since the last report."""
    harness, evicted = Harness(), []
    usage = harness.tier.usage()
    for total in (0, 3, 3, 5):
        harness.tier.usage = lambda total=total: replace(usage, evicted_objects=total)  # type: ignore[method-assign]
        harness.scheduler.record_gauges()
        taken = harness.tally.take()
        assert "evicted_objects" not in taken.gauges
        evicted.append(taken.total("evicted_objects"))
    assert evicted == [0, 3, 0, 2]


def test_a_step_that_changes_no_level_reports_none() -> None:
    """A report goes through every process of the engine, so most steps have none."""
    harness = Harness()
    harness.scheduler.record_gauges()
    first = harness.tally.take()
    assert {"objects", "token_bytes", "pending_loads"} <= first.gauges.keys()
    harness.scheduler.record_gauges()
    assert harness.tally.is_empty()
    usage = harness.tier.usage()
    harness.tier.usage = lambda: replace(usage, used_bytes=usage.used_bytes + 1)  # type: ignore[method-assign]
    harness.scheduler.record_gauges()
    changed = harness.tally.take()
    assert changed.gauges == first.gauges | {"used_bytes": usage.used_bytes + 1}


def test_levels_go_with_everything_that_is_counted() -> None:
    """vLLM's log line says how full a tier is beside what it did, and knows what came since the line before."""
    harness = Harness()
    harness.scheduler.record_gauges()
    harness.tally.take()
    harness.tally.count("restored_tokens", 64)
    harness.scheduler.record_gauges()
    assert "capacity_bytes" in harness.tally.gauges


def test_no_gauge_is_named_as_a_total_is() -> None:
    """A counter's help tells of things that happen, a gauge's of what there is."""
    assert not [gauge.name for gauge in GAUGES.values() if "since start" in gauge.documentation]
