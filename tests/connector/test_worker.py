# SPDX-License-Identifier: Apache-2.0
"""The worker's half over a stream whose copies end when the test says so. In any order: test_worker_in_any_order.py."""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import pytest

from tests.connector.driven_worker import Made, load_jobs, store_jobs
from tests.connector.fake_stream import UNIT
from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector import worker
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.memory import HostBuffer
from vllm_overlay.transfer.base import Handle, Placement, Span

MakeWorker = Callable[..., Made]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeWorker:
    return partial(Made, monkeypatch)


@pytest.fixture
def made(make: MakeWorker) -> Made:
    return make()


# Stores.


def test_a_store_is_the_tiers_only_once_its_copy_has_ended(made: Made) -> None:
    made.store(1, 2)
    made.worker.advance()
    assert (made.tier.stored, made.reports()) == ({}, {})
    made.end()
    assert made.tier.stored == {1: b"\x01" * UNIT, 2: b"\x02" * UNIT}
    assert made.reports() == {1: False, 2: False}


def test_steps_whose_copies_end_in_another_order_are_reported_as_they_end(made: Made) -> None:
    for ticket in (1, 2, 3):
        made.store(ticket)
    for handle, ticket in zip(reversed(made.stream.in_flight), (3, 2, 1), strict=True):
        made.end(handle)
        assert ticket in made.reports()
    assert made.tier.stored == {n: bytes([n]) * UNIT for n in (1, 2, 3)}


def test_a_full_ring_takes_as_many_of_the_first_as_fit(make: MakeWorker) -> None:
    made = make(ring_buffers=3)
    made.store(*range(1, 11))
    assert made.reports() == dict.fromkeys(range(4, 11), True)
    assert made.counted("dropped_stores:transfer_full") == 7
    made.store(20, 21)
    assert made.reports()[20] and made.reports()[21]
    made.end()
    assert set(made.tier.stored) == {1, 2, 3} and made.all_is_free


def test_an_error_after_the_first_submission_leaves_its_stores_alone(
    make: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(ring_buffers=3)
    gather = made.stream.gather

    def fails_the_second_time(placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> Handle | None:
        return raising() if made.stream.in_flight else gather(placements, buffers)

    monkeypatch.setattr(made.stream, "gather", fails_the_second_time)
    with pytest.raises(RuntimeError, match="injected"):
        made.store(1, 2, 3, 4)
    made.worker.fail_stores(store_jobs(1, 2, 3, 4), Reason.HOOK_ERROR)
    assert made.reports() == {3: True, 4: True}
    made.end()
    assert made.tier.stored == {1: b"\x01" * UNIT, 2: b"\x02" * UNIT} and made.all_is_free
    assert made.reports() == {1: False, 2: False, 3: True, 4: True}


def test_a_buffer_that_the_tier_does_not_take_back_costs_no_other(make: MakeWorker) -> None:
    made = make(ring_buffers=1)
    cancel = made.tier.cancel_store

    def refuses_one(ticket: StoreTicket, buffer: HostBuffer) -> None:
        raising() if ticket.ticket == 2 else cancel(ticket, buffer)

    made.tier.cancel_store = refuses_one  # type: ignore[method-assign]
    made.store(1, 2, 3, 4)
    assert made.tier.cancelled_stores == [3, 4]
    made.end()
    assert made.reports() == {1: False, 2: True, 3: True, 4: True}


def test_without_staging_room_a_store_is_dropped_and_the_others_go_on(make: MakeWorker) -> None:
    made = make(num_units=2)
    made.store(1, 2, 3)
    assert made.reports() == {3: True}
    assert made.counted("dropped_stores:staging_full") == 1


def test_a_copy_that_fails_fails_its_stores_and_gives_their_memory_back(made: Made) -> None:
    made.store(1, 2)
    made.end(error=RuntimeError("device-side assert"))
    assert made.reports() == {1: True, 2: True}
    assert (made.tier.stored, made.counted("dropped_stores:transfer_error")) == ({}, 2)
    assert made.all_is_free


# Loads.


def test_objects_are_read_before_the_pass_and_written_after_it(made: Made) -> None:
    jobs = made.begin("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    assert not made.stream.in_flight
    made.worker.start_loads(jobs, ())
    made.end()
    assert made.worker.take_finished() == ({"p"}, set())


def test_a_load_that_is_given_up_before_it_may_write_frees_what_it_holds(made: Made) -> None:
    jobs = made.begin("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    made.worker.fail_loads(jobs, (), Reason.HOOK_ERROR)
    made.worker.start_loads(jobs, ())
    assert not made.stream.in_flight and not made.tier.is_loading("p#1")
    assert made.worker.take_finished() == ({"p"}, {"p"})
    assert made.worker.is_quiet is False  # the report says why
    assert made.report().failed_loads and made.worker.is_quiet


def test_a_load_that_the_tier_refuses_by_an_exception_fails_alone(made: Made) -> None:
    begin = made.tier.begin_load
    made.tier.begin_load = lambda name, tickets: (raising if name == "p#1" else begin)(name, tickets)  # type: ignore[method-assign, assignment]
    made.load("p#1", [7])
    made.load("q#1", [8])
    assert made.worker.take_finished() == ({"p"}, {"p"}) and made.tier.is_loading("q#1")


def test_a_load_is_reported_once_its_last_copy_has_ended(made: Made) -> None:
    rest = Span(0, 9, 16, 48)
    made.load("p#1", [7, 8, 9], (rest,))
    made.tier.arrive("p#1", 0, b"first 0.")
    made.arrive(2, b"third 2.")
    made.arrive(1, b"second 1")
    first, second = made.stream.in_flight
    made.end(second)
    assert made.worker.take_finished() == (set(), set())
    assert made.tier.ended == [("p#1", 1)]
    made.end(first)
    assert made.worker.take_finished() == ({"p"}, set())
    assert made.stream.blocks == {7: b"first 0.", 8: b"second 1", 9: b"third 2."}
    assert made.stream.cleared == [rest]
    assert made.counted("loaded_bytes") == 3 * UNIT


def test_a_load_of_nothing_but_the_rest_of_a_block_ends_too(made: Made) -> None:
    made.load("p#1", [], (Span(0, 9, 16, 48),))
    made.end()
    assert made.worker.take_finished() == ({"p"}, set())
    assert len(made.stream.cleared) == 1


def test_a_late_load_is_reported_only_when_nothing_copies_into_its_blocks(made: Made) -> None:
    made.load("p#1", [7, 8])
    made.arrive(0)
    made.pass_time()
    assert made.tier.late == ["p#1"]
    assert (made.worker.take_finished(), made.tier.cancelled_loads) == ((set(), set()), [])
    made.arrive(1)  # too late, and never copied
    assert len(made.stream.in_flight) == 1
    made.end()
    assert (made.worker.take_finished(), made.tier.cancelled_loads) == (({"p"}, {"p"}), ["p#1"])
    assert made.report().failed_loads == {"p": Reason.TIMEOUT}
    assert made.tier.late == ["p#1"] and made.all_is_free


def test_a_load_whose_copies_alone_are_late_does_not_blame_the_tier(made: Made) -> None:
    made.load("p#1", [7])
    made.arrive()
    made.pass_time()
    assert made.tier.late == []
    made.end()
    assert made.worker.take_finished() == ({"p"}, {"p"})


def test_a_load_with_a_bad_object_waits_for_its_other_copies(made: Made) -> None:
    made.load("p#1", [7, 8, 9])
    made.tier.arrive("p#1", 0, b"content.")
    made.arrive(1)
    made.arrive(2, reason=Reason.CHECKSUM, is_bad=True)
    assert made.worker.take_finished() == (set(), set())
    made.end()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    metadata = made.report()
    assert (metadata.bad_objects, metadata.unreadable_objects) == ({ObjectId("f0", b"\x02")}, set())
    assert metadata.failed_loads == {"p": Reason.CHECKSUM}


def test_an_object_that_could_not_be_read_is_reported_as_such_once_and_not_as_bad(made: Made) -> None:
    made.load("p#1", [7, 8])
    made.arrive(1, reason=Reason.IO_ERROR, is_unreadable=True)
    metadata = made.report()
    assert (metadata.bad_objects, metadata.unreadable_objects) == (set(), {ObjectId("f0", b"\x01")})
    assert metadata.failed_loads == {"p": Reason.IO_ERROR}
    assert made.worker.take_metadata() is None


def test_a_copy_that_fails_fails_its_load(made: Made) -> None:
    made.load("p#1", [7])
    made.arrive()
    made.end(error=RuntimeError("device-side assert"))
    assert made.worker.take_finished() == ({"p"}, {"p"})
    assert made.report().failed_loads == {"p": Reason.TRANSFER_ERROR}


def test_a_broken_device_fails_everything_and_raises_nothing(made: Made) -> None:
    made.stream.is_broken = True
    made.store(1, 2)
    made.load("p#1", [7])
    made.arrive()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    assert made.reports() == {1: True, 2: True} and made.all_is_free


def test_loads_that_cannot_be_started_are_told(made: Made) -> None:
    made.worker.fail_loads(load_jobs("p#1", []), ("q",), Reason.HOOK_ERROR)
    assert made.worker.take_finished() == ({"p", "q"}, {"p", "q"})


def test_a_rank_says_of_what_it_holds_nothing(made: Made) -> None:
    made.store(1, 2)
    first = made.stream.in_flight[0]
    made.load("p#1", [7])
    made.worker.begin_step(17)
    made.worker.answer((1, 2, 3), ("p", "q"))
    metadata = made.report()
    assert (metadata.step, set(metadata.idle_stores), set(metadata.idle_loads)) == (17, {3}, {"q"})
    assert made.worker.take_metadata() is None  # an answer is for the step that asked
    made.end(first)
    made.worker.answer((1, 2), ())  # both are in this step's report
    metadata = made.report()
    assert (set(metadata.reported), set(metadata.idle_stores)) == ({1, 2}, set())
    made.worker.answer((1, 2), ())
    assert set(made.report().idle_stores) == {1, 2}


# A tier or a transfer that raises.


def raising(*_: object) -> NoReturn:
    raise RuntimeError("injected")


def test_a_load_that_failed_is_told_as_failed_even_when_it_is_told_late(made: Made) -> None:
    made.worker.fail_request("p", Reason.NOT_PLANNED)
    made.worker.take_metadata()  # get_transfer_results raised in that step
    assert made.worker.take_finished() == ({"p"}, {"p"})


@pytest.mark.parametrize("method", ["poll", "cancel_load", "load_was_late"])
def test_a_tier_that_raises_costs_a_load_no_more_than_its_time(made: Made, method: str) -> None:
    setattr(made.tier, method, raising)
    made.load("p#1", [7])
    made.load("q#1", [8])
    made.pass_time()
    assert made.worker.take_finished() == ({"p", "q"}, {"p", "q"})
    assert made.counted("hook_errors:advance") == (3 if method == "poll" else 2)


def test_a_store_that_the_tier_refuses_by_an_exception_costs_no_other_copy(made: Made) -> None:
    made.store(1, 2)
    made.load("p#1", [7])
    made.arrive()
    submit = made.tier.submit_store

    def refuses_the_first(ticket: StoreTicket, buffer: HostBuffer) -> None:
        raising() if ticket.ticket == 1 else submit(ticket, buffer)

    made.tier.submit_store = refuses_the_first  # type: ignore[method-assign]
    made.end()
    assert made.reports() == {1: True, 2: False}
    assert made.counted("dropped_stores:hook_error") == 1
    assert made.worker.take_finished() == ({"p"}, set())


@pytest.mark.parametrize("method", ["end_fetch", "scatter"])
def test_a_load_fails_when_what_it_needs_raises(made: Made, method: str) -> None:
    made.load("p#1", [7])
    setattr(made.stream if method == "scatter" else made.tier, method, raising)
    made.arrive()
    made.end()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    assert made.report().failed_loads == {"p": Reason.HOOK_ERROR}


# The end.


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_shutdown_waits_for_the_stream_and_what_may_still_write_keeps_its_memory(
    made: Made, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    monkeypatch.setattr(worker, "_unfinished", [])
    if not has_ended:
        monkeypatch.setattr(made.stream, "close", lambda timeout_s: False)
    made.store(1, 2)
    assert made.worker.close(1.0) == (0 if has_ended else 2)
    assert set(made.tier.stored) == ({1, 2} if has_ended else set())
    memory = weakref.ref(made.tier)
    del made.worker, made.tier
    gc.collect()
    assert (memory() is None) == has_ended


@pytest.mark.parametrize("method", ["close", "poll"])
def test_a_transfer_that_raises_at_the_end_leaves_the_tier_its_end_and_keeps_its_memory(
    made: Made, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    unfinished: list[OffloadWorker] = []
    monkeypatch.setattr(worker, "_unfinished", unfinished)
    monkeypatch.setattr(made.stream, method, raising)
    monkeypatch.setattr(made.tier, "close", lambda timeout_s: 3)
    made.store(1)
    assert made.worker.close(1.0) == 1 + 3
    assert unfinished == [made.worker]
