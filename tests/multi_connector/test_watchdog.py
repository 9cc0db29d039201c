# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from tests.multi_connector.fakes import child, multi, scheduler_output
from tests.multi_connector.lockstep import Clock
from tests.waiting import until
from vllm_overlay.multi_connector import hooks
from vllm_overlay.multi_connector.hooks import Watchdog


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


def begin(dog, hook="wait_for_save"):
    """As a child does before it calls a hook."""
    if dog.needs_thread:
        dog.start()
    dog.call = "cpu", hook, dog.clock(), threading.get_ident()


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
    clock = Clock()
    dog = Watchdog(0.0, clock)
    begin(dog)
    clock.now += 5.0
    assert dog.limit_s == float("inf")
    assert dog._thread is None


def test_its_thread_reports_while_the_hook_hangs_and_ends_when_stopped(lines):
    """The real thread: the hook returns only when the watchdog has spoken."""
    dog = Watchdog(0.02)
    begin(dog, "start_load_kv")
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
