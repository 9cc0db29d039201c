# SPDX-License-Identifier: Apache-2.0
"""Hooks that do nothing are not called, the seconds of the others are counted, and one that hangs is named."""

import ast
import inspect
import threading
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.multi_connector.fakes import child, multi, request, scheduler_output
from tests.multi_connector.lockstep import Clock, Lockstep, answering, rebuilt, tally_of
from tests.waiting import until
from vllm_overlay.connector.connector import HybridOffloadConnector
from vllm_overlay.multi_connector import hooks
from vllm_overlay.multi_connector.hooks import HOOKS, Watchdog, empty_hooks
from vllm_overlay.named_child import empty_hook
from vllm_overlay.tally import ReportTimes


class Inheriting:
    """No connector, but with some of its methods."""

    take_events = KVConnectorBase_V1.take_events
    on_new_request = KVConnectorBase_V1.on_new_request

    def update_connector_output(self, output: object) -> None:
        """Does nothing, and does not say so."""

    @empty_hook
    def save_kv_layer(self, *args: object) -> None:
        """Does nothing."""


class Overriding(Inheriting):
    def take_events(self) -> tuple[str, ...]:
        return ("an event",)

    def save_kv_layer(self, *args: object) -> None:
        """Saves."""


@pytest.mark.parametrize("name", sorted(hooks._MAY_BE_EMPTY))
def test_what_may_be_empty_does_nothing_in_vllms_interface(name: str) -> None:
    """Or is left to the connector. In both cases a call answers what the MultiConnector takes instead."""
    method = vars(KVConnectorBase_V1)[name]
    arguments = [None for _ in inspect.signature(method).parameters.values() if _.kind is not _.VAR_KEYWORD]
    assert not method(*arguments)


def test_a_hook_is_empty_if_it_is_inherited_or_marked_and_neither_overridden_nor_given_to_the_instance() -> None:
    assert empty_hooks(Inheriting()) == {"take_events", "on_new_request", "save_kv_layer"}
    assert empty_hooks(Overriding()) == {"on_new_request"}
    made = Inheriting()
    made.take_events = lambda: ()  # type: ignore[method-assign]
    assert "take_events" not in empty_hooks(made)


def test_hooks_of_a_connector_that_finds_its_attributes_its_own_way_are_all_called() -> None:
    """vLLM's own tests of its MultiConnector do so."""

    class Recording(Inheriting):
        def __getattribute__(self, name: str) -> object:
            return object.__getattribute__(self, name)

    assert empty_hooks(object.__new__(Recording)) == frozenset()


def test_a_tier_has_no_work_for_single_layers() -> None:
    found = empty_hooks(object.__new__(HybridOffloadConnector))
    assert {"wait_for_layer_load", "save_kv_layer", "take_events", "handle_preemptions"} <= found
    assert found.isdisjoint({"build_connector_worker_meta", "update_connector_output", "get_kv_connector_stats"})


def test_an_empty_hook_is_not_called() -> None:
    connector = multi(child("a"), child("b"))
    first, second = connector._children
    first.empty_hooks = frozenset({"wait_for_layer_load"})
    connector.wait_for_layer_load("layer")
    assert first.hook_seconds.keys() == set()
    assert second.hook_seconds.keys() == {"wait_for_layer_load"}


# Where a child's time goes.


def timed(connector):
    """A clock that all of its hooks are measured with, and its reports."""
    clock = Clock()
    for one in connector._children:
        one._watchdog = Watchdog(0.0, clock)
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
    fast, slow = (tally_of(connector, name).histograms["lookup_seconds"] for name in "ab")
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
    found = connector.get_kv_connector_stats().tallies
    assert found["a"].counters["hook_seconds:on_new_request"] == pytest.approx(0.5)
    assert found["a"].counters["hook_seconds:take_events"] == pytest.approx(0.5)
    assert "b" not in found


def test_seconds_wait_for_the_next_quarter_of_a_second_also_where_the_rest_does_not():
    connector = answering(0)
    clock = timed(connector)
    connector.sub_connectors[0].answers["take_events"] = taking(clock, 0.0625, [])
    connector.take_events()
    connector._children[0].tally.count("errors")
    assert connector.get_kv_connector_stats().tallies["a"].counters == {"errors": 1}
    connector.take_events()
    assert connector.get_kv_connector_stats() is None
    clock.now += 0.25
    found = connector.get_kv_connector_stats().tallies["a"].counters
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


# A hook that hangs.


@pytest.fixture
def lines(monkeypatch):
    found = []
    monkeypatch.setattr(hooks.logger, "error", lambda message, *args: found.append(message % args))
    return found


def watched(limit_s=10.0):
    clock = Clock()
    dog = Watchdog(limit_s, clock)
    dog.needs_thread = False  # the test looks
    return dog, clock


def begin(dog):
    """As a child does before it calls a hook."""
    if dog.needs_thread:
        dog.start()
    dog.call = "cpu", "wait_for_save", dog.clock(), threading.get_ident()


def test_a_hook_that_hangs_is_reported_once_with_child_hook_and_place(lines):
    dog, clock = watched()
    begin(dog)
    clock.now += 10.5
    dog.look()
    dog.look()
    (line,) = lines
    assert line.startswith("Connector 'cpu' has not returned from wait_for_save for 10.5 s (hang_after_s)")
    assert "test_a_hook_that_hangs_is_reported_once_with_child_hook_and_place" in line


def test_a_hook_in_time_is_not_reported(lines):
    dog, clock = watched()
    begin(dog)
    clock.now += 9.0
    dog.look()
    dog.call = None
    clock.now += 100.0
    dog.look()
    assert not lines


def test_a_process_that_has_no_more_threads_is_served_without_one(lines, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    dog = Watchdog(10.0)
    for _ in range(2):
        begin(dog)
    (line,) = lines
    assert line.startswith("The watchdog has no thread")


def test_switched_off_it_has_no_thread():
    dog = Watchdog(0.0)
    begin(dog)
    assert dog.limit_s == float("inf") and dog._thread is None


def test_its_thread_reports_while_the_hook_hangs_and_ends_when_stopped(lines):
    """The real thread: the hook returns only when the watchdog has spoken."""
    dog = Watchdog(0.02)
    begin(dog)
    until(lambda: lines, "a word of the watchdog")
    dog.call = None
    dog.stop()
    until(lambda: not dog._thread.is_alive(), "the end of its thread")


def test_a_child_that_comes_back_from_a_hang_is_isolated_and_counted():
    connector = multi(child("a"), child("b"), hang_after_s=10)
    dog, clock = watched()
    for one in connector._children:
        one._watchdog = dog

    def hang(output):
        clock.now += 11
        return None

    connector.sub_connectors[0].answers["build_connector_meta"] = hang
    connector.build_connector_meta(scheduler_output())
    first, second = connector._children
    assert (first.isolated, first.tally.total("hangs")) == (True, 1)
    assert (second.isolated, second.tally.total("hangs")) == (False, 0)
