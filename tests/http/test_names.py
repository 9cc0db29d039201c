# SPDX-License-Identifier: Apache-2.0
"""The README's configuration on a server: metrics of both families, log and control file call a child alike."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from devtools.metrics_page import METRICS
from tests.engine.client import prompt
from tests.engine.states import FLOAT32
from tests.http.warm_server import WarmServer
from tests.test_readme import example
from tests.waiting import until
from vllm_overlay import cli
from vllm_overlay.metrics import CONNECTOR, HOOK, HYBRID_OFFLOAD, MULTI_CONNECTOR, Kind, Metric
from vllm_overlay.multi_connector.hooks import HOOKS
from vllm_overlay.server.api_client import ApiClient, Metrics

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("rank_in_the_core")]

PAGE = Path(__file__).parents[2] / "docs" / "multi-connector.md"
SMALLER = {"cpu": "256 MiB", "disk": "1 GiB"}
"""``capacity_bytes`` for each tier, which the README leaves at its default."""


def series(family: Mapping[str, Metric]) -> list[str]:
    """A name of every metric under which a server exports it."""
    suffixes = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}
    return [f"{metric.name}{suffixes[metric.kind]}" for metric in family.values()]


OURS, MULTIS = series(HYBRID_OFFLOAD), series(MULTI_CONNECTOR)
NOT_OURS = {"model_name", "engine", "le", CONNECTOR}
"""Labels of vLLM, of Prometheus, and the one that all have."""
TIMED = [
    {CONNECTOR: "cpu", HOOK: "get_num_new_matched_tokens"},
    {CONNECTOR: "disk", HOOK: "get_num_new_matched_tokens"},
    {CONNECTOR: "cpu", HOOK: "wait_for_save"},  # of the worker's process, where the disk tier has nothing to do
]


def documented_switches() -> str:
    """The example of a control file."""
    (found,) = re.findall(r"^\{\"disk\".*\}$", PAGE.read_text(), re.MULTILINE)
    return str(found)


def metrics_with_hook_seconds(api: ApiClient) -> Metrics:
    """They are reported at most four times a second, while the engine steps."""
    seeds = itertools.count(1000)

    def after_one_more() -> Metrics | None:
        api.complete(prompt(20, seed=next(seeds)))
        metrics = api.wait_for_stores()
        is_there = all(metrics.value("vllm:kv_connector_hook_seconds_total", **labels) > 0 for labels in TIMED)
        return metrics if is_there else None

    found = until(after_one_more, "the report of hook seconds")
    assert found is not None
    return found


def lines_of(log: Path, text: str) -> list[str]:
    """The log's lines with this text, which comes within an interval of vLLM's log."""
    return until(
        lambda: [line for line in log.read_text().splitlines(keepends=True) if text in line and line.endswith("\n")],
        f"a line with {text!r}",
    )


def test_the_readmes_configuration_has_one_name_for_a_child_everywhere(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(example().replace("/var/cache/vllm-kv", str(tmp_path / "root")))
    for child in config["kv_connector_extra_config"]["connectors"]:
        settings = child["kv_connector_extra_config"]
        settings["capacity_bytes"] = SMALLER[settings["tier"]]
    switches = tmp_path / "switches.json"
    switches.write_text(documented_switches())
    config["kv_connector_extra_config"]["control_file"] = str(switches)
    log_path = tmp_path / "server.log"
    often = {"VLLM_LOG_STATS_INTERVAL": "1"}
    server = WarmServer(tiny_model, config, log_path=log_path, arguments=FLOAT32.flags, environment=often)
    with server as api:
        long, short = prompt(1300, seed=1), prompt(300, seed=2)
        cold = [api.complete(tokens) for tokens in (long, short)]
        stored = api.wait_for_stores().values("vllm:hybrid_offload_stored_objects_total", CONNECTOR)
        for tokens, output in zip((long, short), cold, strict=True):
            api.reset_prefix_cache()
            assert api.complete(tokens).same_as(output)
        metrics = metrics_with_hook_seconds(api)
        check_the_probe(server.url, capsys)
        summaries = lines_of(log_path, "KV Transfer metrics: ")
    in_tiers = {label for name in OURS for label in metrics.values(name, CONNECTOR)}
    assert in_tiers == {"cpu", "disk"}
    found = {name: set(metrics.values(name, CONNECTOR)) for name in MULTIS}
    assert found.pop("vllm:kv_connector_load_weight") == {"cpu"}  # the disk tier has stored nothing to offer
    assert found == dict.fromkeys(found, in_tiers)
    assert stored.get("cpu", 0) > 0
    assert stored.get("disk", 0) == 0
    log = log_path.read_text()
    assert "the children's switches are now {'cpu': {'min_tokens': 512," in log
    assert "changes nothing" not in log
    assert "MultiConnector: cpu (HybridOffloadConnector, weight auto, 0.95 until measured), disk (" in log
    assert f"; control file {switches}" in log
    for tier in ("cpu", "disk"):
        (line,) = [line for line in log.splitlines() if f"] {tier}: chunks of" in line]
        assert "; blocks of 1152 tokens; capacity " in line and " snapshots of " in line
    check_what_was_measured(metrics)
    check_what_is_exported(metrics)
    assert all(len(line) < 400 and ("cpu={'" in line or "disk={'" in line) for line in summaries)


def check_the_probe(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``vllm-overlay probe`` shows the load of the long prompt, from the CPU tier."""
    assert cli.main(["probe", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cpu, disk = found["connectors"]
    assert (cpu["connector"], cpu["state"], cpu["chosen"], disk["chosen"]) == ("cpu", "serving", "1", "0")
    assert [tier["tier"] for tier in found["tiers"]] == ["cpu", "disk"]
    lost = found["tokens that were not restored, by reason"]
    assert {"attention (full)", "prompt_end"} <= {row["reason"] for row in lost}
    assert "tier" in {row["source"] for row in found["time to first token, by where most of the prompt came from"]}


def check_what_is_exported(metrics: Metrics) -> None:
    """A server exports what vllm_overlay/metrics.py has, and no more."""
    ours = {
        name: kind
        for name, kind in metrics.kinds.items()
        if name.startswith(("vllm:hybrid_offload_", "vllm:kv_connector_")) and not name.endswith("_created")
    }
    assert ours == {metric.name: metric.kind for metric in METRICS}
    without_series = {name for name in ours if not metrics.labels[name]}
    assert without_series == {"vllm:hybrid_offload_hook_errors"}  # its hooks are not known before they fail
    labels = {name: metrics.labels[name] - NOT_OURS for name in ours.keys() - without_series}
    assert labels == {metric.name: set(metric.labels[1:]) for metric in METRICS if metric.name in labels}


def check_what_was_measured(metrics: Metrics) -> None:
    """One load of the long prompt; the short one is below ``min_tokens`` of the control file."""
    of = "vllm:kv_connector"
    assert metrics.values(f"{of}_load_seconds_count", CONNECTOR) == {"cpu": 1, "disk": 0}
    assert metrics.value(f"{of}_load_seconds_sum", connector="cpu") > 0
    assert metrics.value(f"{of}_load_seconds_bucket", connector="cpu", le="+Inf") == 1
    ignored = {CONNECTOR: "cpu", "reason": "min_tokens"}
    assert metrics.value(f"{of}_ignored_offers_total", **ignored) == 1
    assert 0 < metrics.value(f"{of}_ignored_offer_tokens_total", **ignored) < 300
    queries = metrics.values(f"{of}_queries_total", CONNECTOR)
    assert all(metrics.value(f"{of}_lookup_seconds_count", connector=name) >= queries[name] > 0 for name in queries)
    assert set(metrics.values(f"{of}_errors_total", HOOK)) == set(metrics.values(f"{of}_hook_seconds_total", HOOK))
    assert metrics.values(f"{of}_errors_total", HOOK) == dict.fromkeys(HOOKS, 0)
