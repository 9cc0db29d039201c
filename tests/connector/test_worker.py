# SPDX-License-Identifier: Apache-2.0
"""The worker's half over a stream whose copies end when the test says so, in any order."""

import gc
import itertools
import random
import weakref
from collections.abc import Sequence

import pytest

from tests.connector.fake_stream import UNIT, FakeStream, FakeTier, FlakyTier
from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector import worker
from vllm_overlay.connector.lora.digests import LoadedAdapters
from vllm_overlay.connector.metadata import LoadJob, StoreJob
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import LoadTicket, StoreTicket
from vllm_overlay.tiers.memory import HostBuffer
from vllm_overlay.transfer.base import Handle, Placement, Span

LOAD_TIMEOUT_S = 1000.0
"""Only a test that moves the clock reaches it."""


def at(block_id: int) -> Placement:
    return Placement(spans=(Span(0, block_id, 0, 64),))


class Made:
    """A worker's half, its tier and its stream."""

    def __init__(self, num_units: int = 64, ring_buffers: int = 1 << 30) -> None:
        self.stream = FakeStream(ring_buffers)
        self.num_units = num_units
        self.tally, self.told = Tally(), Tally()
        self.reported: dict[int, bool] = {}
        self.use(FakeTier(num_units))

    def use(self, tier: FakeTier) -> None:
        self.tier = tier
        self.worker = OffloadWorker(
            self.stream, tier, LoadedAdapters(), load_timeout_s=LOAD_TIMEOUT_S, tally=self.tally
        )

    def store(self, *tickets: int) -> None:
        """Store blocks of these numbers under tickets of the same numbers; each block holds its number."""
        for ticket in tickets:
            self.stream.blocks[ticket] = bytes([ticket]) * UNIT
        self.worker.store(tuple(StoreJob(store_ticket(ticket), at(ticket)) for ticket in tickets))
        for ticket in tickets:
            self.stream.blocks[ticket] = b"reused!!"

    def load(self, load_id: str, blocks: list[int], zeros: tuple[Span, ...] = ()) -> None:
        self.worker.start_loads(self.begin(load_id, blocks, zeros), ())

    def begin(self, load_id: str, blocks: list[int], zeros: tuple[Span, ...] = ()) -> tuple[LoadJob, ...]:
        """What happens of a load before the pass."""
        tickets = tuple(LoadTicket(n, ObjectId("f0", bytes([n])), UNIT) for n in range(len(blocks)))
        placements = tuple(map(at, blocks))
        jobs = (LoadJob(load_id, load_id[0], tickets, placements, zeros),)
        self.worker.begin_loads(jobs)
        return jobs

    def reports(self) -> dict[int, bool]:
        """Tickets that were reported so far, and whether they failed."""
        metadata = self.worker.take_metadata()
        if metadata is not None:
            assert not set(metadata.reported) & set(self.reported), "a ticket was reported twice"
            self.reported |= {ticket: ticket in metadata.failed_stores for ticket in metadata.reported}
            self.told.add(metadata.tally)
        return self.reported

    def counted(self, name: str) -> float:
        """Told with a report, or to be told with the next."""
        return self.told.counters.get(name, 0) + self.tally.counters.get(name, 0)


def store_ticket(ticket: int) -> StoreTicket:
    return StoreTicket(ticket, PlannedObject(ObjectId("f0", bytes([ticket])), (), 0, 64, UNIT))


@pytest.fixture
def made() -> Made:
    return Made()


# Stores.


def test_a_store_is_the_tiers_only_once_its_copy_has_ended(made: Made) -> None:
    made.store(1, 2)
    made.worker.advance()
    assert (made.tier.stored, made.reports()) == ({}, {})
    (handle,) = made.stream.in_flight
    made.stream.end(handle)
    made.worker.advance()
    assert made.tier.stored == {1: b"\x01" * UNIT, 2: b"\x02" * UNIT}
    assert made.reports() == {1: False, 2: False}


def test_steps_whose_copies_end_in_another_order_are_reported_as_they_end(made: Made) -> None:
    for ticket in (1, 2, 3):
        made.store(ticket)
    for handle, ticket in zip(reversed(made.stream.in_flight), (3, 2, 1), strict=True):
        made.stream.end(handle)
        made.worker.advance()
        assert ticket in made.reports()
    assert made.tier.stored == {n: bytes([n]) * UNIT for n in (1, 2, 3)}


def test_a_full_ring_takes_as_many_of_the_first_as_fit() -> None:
    made = Made(ring_buffers=3)
    made.store(*range(1, 11))
    assert made.reports() == dict.fromkeys(range(4, 11), True)
    assert made.counted("dropped_stores:transfer_full") == 7
    made.store(20, 21)
    assert made.reports()[20] and made.reports()[21]
    for handle in made.stream.in_flight:
        made.stream.end(handle)
    made.worker.advance()
    assert set(made.tier.stored) == {1, 2, 3}
    assert len(made.tier.free) == made.num_units


def test_an_error_after_the_first_submission_leaves_its_stores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(ring_buffers=3)
    gather = made.stream.gather

    def fails_the_second_time(placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> Handle | None:
        if made.stream.in_flight:
            raise RuntimeError("no such stream")
        return gather(placements, buffers)

    monkeypatch.setattr(made.stream, "gather", fails_the_second_time)
    with pytest.raises(RuntimeError, match="no such stream"):
        made.store(1, 2, 3, 4)
    made.worker.fail_stores(tuple(StoreJob(store_ticket(n), at(n)) for n in (1, 2, 3, 4)), Reason.HOOK_ERROR)
    assert made.reports() == {3: True, 4: True}
    (handle,) = made.stream.in_flight
    made.stream.end(handle)
    made.worker.advance()
    assert made.tier.stored == {1: b"\x01" * UNIT, 2: b"\x02" * UNIT}
    assert len(made.tier.free) == made.num_units


def test_without_staging_room_a_store_is_dropped_and_the_others_go_on() -> None:
    made = Made(num_units=2)
    made.store(1, 2, 3)
    assert made.reports() == {3: True}
    assert made.counted("dropped_stores:staging_full") == 1


def test_a_copy_that_fails_fails_its_stores_and_gives_their_memory_back(made: Made) -> None:
    made.store(1, 2)
    made.stream.end(made.stream.in_flight[0], RuntimeError("device-side assert"))
    made.worker.advance()
    assert made.reports() == {1: True, 2: True}
    assert (made.tier.stored, made.counted("dropped_stores:transfer_error")) == ({}, 2)
    assert len(made.tier.free) == made.num_units


def test_an_unexpected_error_reports_each_ticket_once(made: Made) -> None:
    made.store(1)
    made.worker.fail_stores((StoreJob(store_ticket(1), at(1)), StoreJob(store_ticket(2), at(2))), Reason.HOOK_ERROR)
    assert made.reports() == {2: True}  # the first is on its way
    made.stream.end(made.stream.in_flight[0])
    made.worker.advance()
    assert made.reports() == {1: False, 2: True}


# Loads.


def test_objects_are_read_before_the_pass_and_written_after_it(made: Made) -> None:
    jobs = made.begin("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    assert not made.stream.in_flight
    made.worker.start_loads(jobs, ())
    made.stream.end(*made.stream.in_flight)
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, set())


def test_a_load_that_is_given_up_before_it_may_write_frees_what_it_holds(made: Made) -> None:
    jobs = made.begin("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    made.worker.fail_loads(jobs, (), Reason.HOOK_ERROR)
    made.worker.start_loads(jobs, ())
    assert not made.stream.in_flight and not made.tier.is_loading("p#1")
    assert made.worker.take_finished() == ({"p"}, {"p"})
    assert made.worker.is_quiet is False  # the report says why
    assert made.worker.take_metadata() is not None and made.worker.is_quiet


def test_a_load_that_the_tier_refuses_by_an_exception_fails_alone(made: Made) -> None:
    begin = made.tier.begin_load
    made.tier.begin_load = lambda name, tickets: raising() if name == "p#1" else begin(name, tickets)  # type: ignore[method-assign]
    made.load("p#1", [7])
    made.load("q#1", [8])
    assert made.worker.take_finished() == ({"p"}, {"p"}) and made.tier.is_loading("q#1")


def test_a_load_is_reported_once_its_last_copy_has_ended(made: Made) -> None:
    rest = Span(0, 9, 16, 48)
    made.load("p#1", [7, 8, 9], (rest,))
    made.tier.arrive("p#1", 0, b"first 0.")
    made.tier.arrive("p#1", 2, b"third 2.")
    made.worker.advance()
    made.tier.arrive("p#1", 1, b"second 1")
    made.worker.advance()
    first, second = made.stream.in_flight
    made.stream.end(second)
    made.worker.advance()
    assert made.worker.take_finished() == (set(), set())
    assert made.tier.ended == [("p#1", 1)]
    made.stream.end(first)
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, set())
    assert made.stream.blocks == {7: b"first 0.", 8: b"second 1", 9: b"third 2."}
    assert made.stream.cleared == [rest]
    assert made.counted("loaded_bytes") == 3 * UNIT


def test_a_load_of_nothing_but_the_rest_of_a_block_ends_too(made: Made) -> None:
    made.load("p#1", [], (Span(0, 9, 16, 48),))
    made.stream.end(made.stream.in_flight[0])
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, set())
    assert len(made.stream.cleared) == 1


def test_a_late_load_is_reported_only_when_nothing_copies_into_its_blocks(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    made.load("p#1", [7, 8])
    made.tier.arrive("p#1", 0, b"content.")
    made.worker.advance()
    now[0] += LOAD_TIMEOUT_S + 0.1
    made.worker.advance()
    assert made.tier.late == ["p#1"]
    assert (made.worker.take_finished(), made.tier.cancelled_loads) == ((set(), set()), [])
    made.tier.arrive("p#1", 1, b"content.")  # too late, and never copied
    made.worker.advance()
    assert len(made.stream.in_flight) == 1
    made.stream.end(made.stream.in_flight[0])
    made.worker.advance()
    assert (made.worker.take_finished(), made.tier.cancelled_loads) == (({"p"}, {"p"}), ["p#1"])
    metadata = made.worker.take_metadata()
    assert metadata is not None and metadata.failed_loads == {"p": Reason.TIMEOUT}
    assert made.tier.late == ["p#1"]
    assert len(made.tier.free) == made.num_units


def test_a_load_whose_copies_alone_are_late_does_not_blame_the_tier(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    made.load("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    made.worker.advance()
    now[0] += LOAD_TIMEOUT_S + 0.1
    made.worker.advance()
    assert made.tier.late == []
    made.stream.end(made.stream.in_flight[0])
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, {"p"})


def test_a_load_with_a_bad_object_waits_for_its_other_copies(made: Made) -> None:
    made.load("p#1", [7, 8, 9])
    made.tier.arrive("p#1", 0, b"content.")
    made.tier.arrive("p#1", 1, b"content.")
    made.worker.advance()
    made.tier.arrive("p#1", 2, b"", reason=Reason.CHECKSUM, is_bad=True)
    made.worker.advance()
    assert made.worker.take_finished() == (set(), set())
    made.stream.end(made.stream.in_flight[0])
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    metadata = made.worker.take_metadata()
    assert metadata is not None and metadata.bad_objects == {ObjectId("f0", b"\x02")}
    assert metadata.failed_loads == {"p": Reason.CHECKSUM}


def test_an_object_that_could_not_be_read_is_reported_as_such_once_and_not_as_bad(made: Made) -> None:
    made.load("p#1", [7, 8])
    made.tier.arrive("p#1", 1, b"", reason=Reason.IO_ERROR, is_unreadable=True)
    made.worker.advance()
    metadata = made.worker.take_metadata()
    assert metadata is not None
    assert (metadata.bad_objects, metadata.unreadable_objects) == (set(), {ObjectId("f0", b"\x01")})
    assert metadata.failed_loads == {"p": Reason.IO_ERROR}
    assert made.worker.take_metadata() is None


def test_a_copy_that_fails_fails_its_load(made: Made) -> None:
    made.load("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    made.worker.advance()
    made.stream.end(made.stream.in_flight[0], RuntimeError("device-side assert"))
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    metadata = made.worker.take_metadata()
    assert metadata is not None and metadata.failed_loads == {"p": Reason.TRANSFER_ERROR}


def test_a_broken_device_fails_everything_and_raises_nothing(made: Made) -> None:
    made.stream.is_broken = True
    made.store(1, 2)
    made.load("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    assert made.reports() == {1: True, 2: True}
    assert len(made.tier.free) == made.num_units


def test_loads_that_cannot_be_started_are_told(made: Made) -> None:
    jobs = (LoadJob("p#1", "p", (), (), ()),)
    made.worker.fail_loads(jobs, ("q",), Reason.HOOK_ERROR)
    assert made.worker.take_finished() == ({"p", "q"}, {"p", "q"})


def test_a_rank_says_of_what_it_holds_nothing(made: Made) -> None:
    made.store(1, 2)
    first = made.stream.in_flight[0]
    made.load("p#1", [7])
    made.worker.begin_step(17)
    made.worker.answer((1, 2, 3), ("p", "q"))
    metadata = made.worker.take_metadata()
    assert metadata is not None and metadata.step == 17
    assert (set(metadata.idle_stores), set(metadata.idle_loads)) == ({3}, {"q"})
    assert made.worker.take_metadata() is None  # an answer is for the step that asked
    made.stream.end(first)
    made.worker.advance()
    made.worker.answer((1, 2), ())  # both are in this step's report
    metadata = made.worker.take_metadata()
    assert metadata is not None and (set(metadata.reported), set(metadata.idle_stores)) == ({1, 2}, set())
    made.worker.answer((1, 2), ())
    metadata = made.worker.take_metadata()
    assert metadata is not None and set(metadata.idle_stores) == {1, 2}


# A tier or a transfer that raises.


def raising(*_: object) -> None:
    raise RuntimeError("injected")


def test_a_load_that_failed_is_told_as_failed_even_when_it_is_told_late(made: Made) -> None:
    made.worker.fail_request("p", Reason.NOT_PLANNED)
    made.worker.take_metadata()  # get_transfer_results raised in that step
    assert made.worker.take_finished() == ({"p"}, {"p"})


def test_a_tier_that_never_answers_but_raises_costs_a_load_its_time(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    made.tier.poll = raising  # type: ignore[method-assign, assignment]
    made.load("p#1", [7])
    now[0] += LOAD_TIMEOUT_S + 0.1
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    assert made.counted("hook_errors:advance") == 2


@pytest.mark.parametrize("method", ["cancel_load", "load_was_late"])
def test_loads_are_told_as_failed_although_the_tier_cannot_cancel_them(
    made: Made, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    setattr(made.tier, method, raising)
    made.load("p#1", [7])
    made.load("q#1", [8])
    now[0] += LOAD_TIMEOUT_S + 0.1
    made.worker.advance()
    assert made.worker.take_finished() == ({"p", "q"}, {"p", "q"})


def test_a_store_that_the_tier_refuses_by_an_exception_costs_no_other_copy(made: Made) -> None:
    made.store(1, 2)
    made.load("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    made.worker.advance()
    submit = made.tier.submit_store

    def refuses_the_first(ticket: StoreTicket, buffer: HostBuffer) -> None:
        raising() if ticket.ticket == 1 else submit(ticket, buffer)

    made.tier.submit_store = refuses_the_first  # type: ignore[method-assign]
    for handle in made.stream.in_flight:
        made.stream.end(handle)
    made.worker.advance()
    assert made.reports() == {1: True, 2: False}
    assert made.counted("dropped_stores:hook_error") == 1
    assert made.worker.take_finished() == ({"p"}, set())


@pytest.mark.parametrize("method", ["end_fetch", "scatter"])
def test_a_load_fails_when_what_it_needs_raises(made: Made, method: str) -> None:
    made.load("p#1", [7])
    made.tier.arrive("p#1", 0, b"content.")
    setattr(made.stream if method == "scatter" else made.tier, method, raising)
    made.worker.advance()
    for handle in made.stream.in_flight:
        made.stream.end(handle)
    made.worker.advance()
    assert made.worker.take_finished() == ({"p"}, {"p"})
    metadata = made.worker.take_metadata()
    assert metadata is not None and metadata.failed_loads == {"p": Reason.HOOK_ERROR}


# The end.


def test_a_shutdown_waits_for_the_stream_and_stores_what_it_brings(made: Made) -> None:
    made.store(1, 2)
    assert made.worker.close(1.0) == 0
    assert set(made.tier.stored) == {1, 2}


def test_a_shutdown_counts_copies_that_are_stuck(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.store(1, 2)
    monkeypatch.setattr(made.stream, "close", lambda timeout_s: False)
    assert made.worker.close(0.0) == 2


@pytest.mark.parametrize("has_ended", [True, False])
def test_memory_that_copies_may_still_write_to_outlives_the_worker(
    made: Made, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    monkeypatch.setattr(worker, "_unfinished", [])
    monkeypatch.setattr(made.stream, "close", lambda timeout_s: has_ended)
    made.worker.close(0.0)
    memory = weakref.ref(made.tier)
    del made.worker, made.tier
    gc.collect()
    assert (memory() is None) == has_ended


# Anything in any order.


class Chaos:
    """Stores, loads, fetches and copies that come and end in any order, under a guard such as the connector's."""

    def __init__(self, seed: int, probability: float, now: list[float]) -> None:
        self.luck = random.Random(seed)
        self.made = Made(num_units=self.luck.choice([4, 16, 64]), ring_buffers=self.luck.choice([2, 8, 64]))
        if probability:
            self.made.use(FlakyTier(self.made.num_units, self.luck, probability))
        self.stored: set[int] = set()
        self.loads: set[str] = set()
        self.finished: list[str] = []
        self._now = now
        self._numbers = itertools.count(1)
        self._waiting: list[tuple[str, int]] = []

    def step(self) -> None:
        event = self.luck.random()
        if event < 0.25:
            self._store()
        elif event < 0.4:
            self._load()
        elif event < 0.65 and self._waiting and self.made.tier.free:
            self._arrive()
        elif event < 0.95 and self.made.stream.in_flight:
            error = RuntimeError("x") if self.luck.random() < 0.1 else None
            self.made.stream.end(self.luck.choice(self.made.stream.in_flight), error)
        else:
            self._now[0] += self.luck.choice([0.0, 1.0, LOAD_TIMEOUT_S + 1])
        self.end_step()

    def end_step(self) -> None:
        self.made.worker.advance()
        self.made.reports()
        done, _ = self.made.worker.take_finished()
        for name in done:
            copying = [p.spans[0].block_id for copy in self.made.stream.submitted.values() for p in copy.placements]
            assert not any(block >> 8 == int(name[1:]) for block in copying), "reported with a copy under way"
        self.finished.extend(done)

    def _store(self) -> None:
        tickets = [next(self._numbers) for _ in range(self.luck.randint(1, 4))]
        for ticket in tickets:
            self.made.stream.blocks[ticket] = bytes([ticket % 256]) * UNIT
        jobs = tuple(StoreJob(a_ticket(ticket), at(ticket)) for ticket in tickets)
        try:
            self.made.worker.store(jobs)
        except RuntimeError:
            self.made.worker.fail_stores(jobs, Reason.HOOK_ERROR)
        self.stored.update(tickets)

    def _load(self) -> None:
        number = next(self._numbers)
        count = self.luck.randint(1, 3)
        objects = tuple(LoadTicket(n, ObjectId("f0", bytes([n])), UNIT) for n in range(count))
        jobs = (LoadJob(f"r{number}#1", f"r{number}", objects, tuple(at((number << 8) + n) for n in range(count)), ()),)
        try:
            self.made.worker.begin_loads(jobs)
            self.made.worker.start_loads(jobs, ())
        except RuntimeError:
            self.made.worker.fail_loads(jobs, (), Reason.HOOK_ERROR)
        self.loads.add(f"r{number}")
        self._waiting += [(f"r{number}#1", n) for n in range(count)]

    def _arrive(self) -> None:
        load_id, position = self._waiting.pop(self.luck.randrange(len(self._waiting)))
        if self.made.tier.is_loading(load_id):
            failure = {"reason": Reason.IO_ERROR} if self.luck.random() < 0.2 else {}
            self.made.tier.arrive(load_id, position, b"content.", **failure)


@pytest.mark.parametrize("probability", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_ends_when_every_ticket_and_load_is_reported_once(
    seed: int, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    chaos = Chaos(seed, probability, now)
    for _ in range(120):
        chaos.step()
    now[0] += LOAD_TIMEOUT_S + 1
    for _ in range(50):
        for handle in chaos.made.stream.in_flight:
            chaos.made.stream.end(handle)
        chaos.end_step()
    assert set(chaos.made.reports()) == chaos.stored
    assert sorted(chaos.finished) == sorted(chaos.loads)
    if not probability:  # else the tier has lost some of it
        assert len(chaos.made.tier.free) == chaos.made.num_units


def a_ticket(ticket: int) -> StoreTicket:
    return StoreTicket(ticket, PlannedObject(ObjectId("f0", ticket.to_bytes(4, "big")), (), 0, 64, UNIT))
