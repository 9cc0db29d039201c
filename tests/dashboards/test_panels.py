# SPDX-License-Identifier: Apache-2.0
"""Every query of every panel on a real Prometheus beside a real server; hit rates equal the client's own count."""

import time
from pathlib import Path

import pytest

from tests.dashboards.boards import Target, read, target, targets
from tests.dashboards.observed import Observed, observed
from tests.dashboards.prometheus import NotToBeHadError, program
from tests.dashboards.prometheus_api import PrometheusApi
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.dashboards]

CHILDREN = {"cpu", "disk"}
EXACT = 1e-9
FIRING = 'ALERTS{alertstate="firing"}'


@pytest.fixture(scope="module", autouse=True)
def a_prometheus() -> None:
    try:
        program("prometheus")
    except NotToBeHadError as error:
        pytest.skip(f"no Prometheus: {error}")


def by_connector(api: PrometheusApi, panel: Target, at: float, window_s: float) -> dict[str, float]:
    """A panel's lines over the whole window."""
    found = api.query(panel.in_window(int(window_s) + 1), at)
    return {series.labels["connector"]: series.samples[0][1] for series in found}


def check_hit_rates(run: Observed, at: float) -> None:
    """Of all tokens beyond the whole blocks in the device cache, by connector, against what the client was told."""
    ledgers = run.traffic.ledgers
    (block,) = {series.samples[0][1] for series in run.prometheus.query("vllm:hybrid_offload_block_tokens", at)}
    in_blocks = ledgers["device"].cached_tokens // block * block  # of its one request
    asked = sum(one.prompt_tokens for one in ledgers.values()) - in_blocks
    expected = {name: ledgers[name].cached_tokens / asked for name in CHILDREN}
    assert all(0.1 < rate < 0.5 for rate in expected.values())
    window = at - run.started
    assert by_connector(run.prometheus, target("Hit rate"), at, window) == pytest.approx(expected, abs=EXACT)
    had = by_connector(run.prometheus, target("What connectors had"), at, window)
    assert had["disk"] > expected["disk"]  # it had what the CPU tier loaded, too
    assert had["cpu"] == pytest.approx(expected["cpu"], abs=EXACT)  # ignored offers are not in it
    (not_computed,) = run.prometheus.query(target("Prompt tokens not computed").in_window(int(window) + 1), at)
    cached, prompts = (
        sum(getattr(one, field) for one in ledgers.values()) for field in ("cached_tokens", "prompt_tokens")
    )
    assert not_computed.samples[0][1] == pytest.approx(cached / prompts, abs=EXACT)


def check_every_panel(run: Observed, at: float) -> None:
    """Each query has data, of both children where it is by connector."""
    window = int(at - run.started) + 1
    without = []
    for one in targets():
        found = run.prometheus.query(one.in_window(window), at)
        labels = {series.labels["connector"] for series in found if "connector" in series.labels}
        if not found or labels not in (CHILDREN, set()):
            without.append(f"{one}: {labels}: {one.in_window(window)}")
    assert without == []
    failed = run.prometheus.query(target("Failed loads").in_window(window), at)
    reasons = {series.labels["reason"] for series in failed if series.samples[0][1] > 0}
    assert reasons == {"checksum"}
    (not_verified,) = run.prometheus.query(target("Loads that did not verify").in_window(window), at)
    assert not_verified.samples[0][1] > 0


def check_the_alerts(run: Observed) -> None:
    """Those of the damaged files, and no other. Rules are evaluated beside the scrapes, at times of their own."""
    until(lambda: run.prometheus.query(FIRING, time.time()), "an alert")
    firing = run.prometheus.query(FIRING, run.seen())
    found = {(one.labels["alertname"], one.labels["connector"], one.labels["reason"]) for one in firing}
    assert found == {("VllmOverlayVerificationFailed", "disk", "checksum")}


def check_the_variables(run: Observed, at: float) -> None:
    """Each offers what the server has, and choosing one connector leaves the other out."""
    offered = {}
    for variable in read("overview")["templating"]["list"][1:]:
        selector, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        selector = Target("", "", "", selector, "").in_window(60)
        offered[variable["name"]] = run.prometheus.label_values(label, selector)
    assert offered["model"] == ["tiny"]
    assert offered["engine"] == ["0"]
    assert offered["connector"] == sorted(CHILDREN)
    assert len(offered["server"]) == 1
    chosen = target("Hit rate").in_window(int(at - run.started) + 1, {"connector": "cpu"})
    assert [series.labels["connector"] for series in run.prometheus.query(chosen, at)] == ["cpu"]


def test_panels_show_what_the_client_saw(tiny_model: Path, tmp_path: Path) -> None:
    with observed(tiny_model, tmp_path) as run:
        run.traffic.misses()
        run.traffic.cpu_hits()
        run.traffic.disk_hits()
        run.traffic.device_hits()
        check_hit_rates(run, run.seen())
        run.traffic.failures()
        at = run.seen()
        check_every_panel(run, at)
        check_the_variables(run, at)
        check_the_alerts(run)
    assert run.traffic.ledgers["failures"].cached_tokens == 0
