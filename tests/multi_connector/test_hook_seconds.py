# SPDX-License-Identifier: Apache-2.0
"""Where a child's time goes: seconds by hook, and how long each lookup took."""

import ast
from pathlib import Path

import pytest

from tests.multi_connector.fakes import request
from tests.multi_connector.lockstep import Clock, Lockstep, answering, rebuilt, tally_of
from vllm_overlay.multi_connector.hooks import HOOKS, Watchdog
from vllm_overlay.tally import ReportTimes


def timed(connector):
    """A clock that all of its hooks are measured with, and its reports."""
    clock = Clock()
    for child in connector._children:
        child._watchdog = Watchdog(0.0, clock)
    connector._report_times = ReportTimes(clock)
    connector.get_kv_connector_stats()
    return clock


def taking(clock, seconds, answer=None):
    def hook(*args):
        clock.now += seconds
        return answer

    return hook


def test_a_slow_lookup_is_seen_of_the_child_that_is_slow():
    connector = answering(100, 90)
    clock = timed(connector)
    connector.sub_connectors[1].answers["get_num_new_matched_tokens"] = taking(clock, 0.2, (90, True))
    connector.get_num_new_matched_tokens(request(), 0)
    slow, fast = (
        tally_of(connector, "b").histograms["lookup_seconds"],
        tally_of(connector, "a").histograms["lookup_seconds"],
    )
    assert (slow.count, slow.sum) == (1, pytest.approx(0.2))
    assert (fast.count, fast.sum) == (1, 0.0)


def test_seconds_are_counted_by_hook():
    connector = answering(0, 0)
    clock = timed(connector)
    fake = connector.sub_connectors[0]
    fake.answers["on_new_request"] = taking(clock, 0.25)
    fake.answers["take_events"] = taking(clock, 0.5, [])
    for _ in range(2):
        connector.on_new_request(request())
    connector.take_events()
    clock.now += 1.0
    found = connector.get_kv_connector_stats().data["*"].tallies
    assert found["a"].counters["hook_seconds:on_new_request"] == pytest.approx(0.5)
    assert found["a"].counters["hook_seconds:take_events"] == pytest.approx(0.5)
    assert "b" not in found


def test_seconds_wait_for_the_next_quarter_of_a_second_also_where_the_rest_does_not():
    connector = answering(0)
    clock = timed(connector)
    connector.sub_connectors[0].answers["take_events"] = taking(clock, 0.0625, [])
    connector.take_events()
    connector._children[0].tally.count("errors")
    assert connector.get_kv_connector_stats().data["*"].tallies["a"].counters == {"errors": 1}
    connector.take_events()
    assert connector.get_kv_connector_stats() is None
    clock.now += 0.25
    found = connector.get_kv_connector_stats().data["*"].tallies["a"].counters
    assert found["hook_seconds:take_events"] == 0.125


@pytest.mark.parametrize("where", ["scheduler", "worker"])
def test_what_an_instance_that_comes_back_takes_to_start_is_counted(where):
    engine = Lockstep()
    side, other = engine.scheduler, engine.workers[0]
    side, other = (side, other) if where == "scheduler" else (other, side)
    clock, _ = timed(side), timed(other)
    engine.fail()
    started = "bind_kv_cache_manager" if where == "scheduler" else "register_kv_caches"

    def make(fake):
        clock.now += 2.0
        fake.answers[started] = taking(clock, 1.0)

    rebuilt(side, make)
    side.sub_connectors[0].answers["shutdown"] = taking(clock, 3.0)
    assert engine.recover()
    clock.now += 1.0
    engine.step()
    took = {"__init__": 2.0, started: 1.0, **({"shutdown": 3.0} if where == "scheduler" else {})}
    assert {hook: engine.tallies["a"].counters[f"hook_seconds:{hook}"] for hook in took} == pytest.approx(took)


def test_every_hook_that_the_code_calls_is_one_of_them():
    package = Path(__file__).parents[2] / "vllm_overlay" / "multi_connector"
    called = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(name := node.args[0], ast.Constant):
                function = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
                if function in ("call", "ask", "_call_all"):
                    called.add(name.value)
    assert len(called) > 25
    assert called <= set(HOOKS)
