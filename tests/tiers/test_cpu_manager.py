# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's scheduler half: every order of stores, loads, drops and resets keeps its index and its units right."""

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.strategies import everything, families_of_prompts, geometries
from tests.tiers.entries import entries_of
from tests.tiers.integrity import check_integrity
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import LoadTicket, TierManager
from vllm_overlay.tiers.cpu import CpuTierManager
from vllm_overlay.tiers.memory import units_needed

UNIT = 16
WORLD_SIZE = 2


class CpuManagerMachine(RuleBasedStateMachine):
    """Drives the tier as the connector's scheduler does. Reports may come twice, late and in any order."""

    @initialize(
        geometry=geometries(max_groups=4) | geometries(max_groups=4, hybrid=True),
        prompts=families_of_prompts(max_units=12),
        num_units=st.integers(1, 60),
    )
    def start(self, geometry, prompts, num_units):
        self.objects = list({item.object_id: item for keys in prompts for item in everything(geometry, keys)}.values())
        self.tier = CpuTierManager(num_units, UNIT, WORLD_SIZE)
        self.num_units = num_units
        self.tickets: list[int] = []
        self.loads: list[list[LoadTicket]] = []

    def some_objects(self, data):
        """Mostly visible ones, where there are any."""
        visible = [item for item in self.objects if self.tier.index.has(item.object_id)]
        pool = data.draw(st.sampled_from([visible, visible, self.objects])) or self.objects
        return data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4)) if pool else []

    @rule(data=st.data(), count=st.integers(1, 12), commits=st.booleans())
    def store(self, data, count, commits):
        """A run of objects in parents-first order, from anywhere in the list."""
        first = data.draw(st.integers(0, max(0, len(self.objects) - 1)))
        for item in self.objects[first : first + count]:
            ticket = self.tier.reserve(item)
            if ticket is not None:
                assert len(ticket.part) == units_needed(item.num_bytes, UNIT)
                self.tickets.append(ticket.ticket)
                if commits:
                    self.tier.commit(ticket.ticket)

    @rule(data=st.data(), count=st.integers(1, 12), commits=st.booleans())
    def store_together(self, data, count, commits):
        """As a step does: one question for all, in any order, and one call for all that every rank has stored."""
        first = data.draw(st.integers(0, max(0, len(self.objects) - 1)))
        planned = data.draw(st.permutations(self.objects[first : first + count]) | st.just(self.objects[first:]))
        tickets = self.tier.reserve_all(planned)
        assert [item for item, ticket in zip(planned, tickets, strict=True) if ticket is not None] == [
            ticket.planned for ticket in tickets if ticket is not None
        ]
        out = [ticket for ticket in tickets if ticket is not None]
        assert all(len(ticket.part) == units_needed(ticket.planned.num_bytes, UNIT) for ticket in out)
        self.tickets += [ticket.ticket for ticket in out]
        if commits:
            self.tier.commit_all([ticket.ticket for ticket in out])

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), does_commit=st.booleans())
    def report(self, data, does_commit):
        ticket = data.draw(st.sampled_from(self.tickets))
        (self.tier.commit if does_commit else self.tier.abort)(ticket)

    @rule()
    def commit_all_last_first(self):
        for ticket in reversed(self.tickets):
            self.tier.commit(ticket)

    @rule(data=st.data())
    def acquire(self, data):
        wanted = self.some_objects(data)
        tickets = self.tier.acquire(wanted)
        if tickets is not None:
            assert [ticket.object_id for ticket in tickets] == [item.object_id for item in wanted]
            self.loads.append(tickets)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def release(self, data):
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.tier.release(load)

    @rule(data=st.data())
    def drop(self, data):
        for item in self.some_objects(data)[:1]:
            self.tier.drop(item.object_id)

    @precondition(lambda self: any(self.loads))
    @rule(data=st.data())
    def drop_what_is_loaded(self, data):
        load = data.draw(st.sampled_from([load for load in self.loads if load]))
        self.tier.drop(load[0].object_id)

    @rule()
    def clear(self):
        self.tier.clear()

    @invariant()
    def index_agrees_with_itself_and_keeps_the_capacity(self):
        check_integrity(self.tier.index)
        assert self.tier.index.fits(0)

    @invariant()
    def every_unit_is_free_or_has_one_object(self):
        taken = [unit for entry in entries_of(self.tier.index).values() for unit in entry.units]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(self.num_units))
        assert self.tier.usage().used_bytes == len(taken) * UNIT * WORLD_SIZE

    @invariant()
    def units_stay_while_a_load_reads_them(self):
        entries = entries_of(self.tier.index)
        for ticket in itertools.chain.from_iterable(self.loads):
            assert entries[ticket.object_id].units == ticket.part


CpuManagerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCpuManager = CpuManagerMachine.TestCase


@st.composite
def steps_of_prompts(draw: st.DrawFn) -> tuple[int, list[list[PlannedObject]]]:
    """The units of a tier, and runs of objects that are stored one after the other."""
    geometry = draw(geometries(max_groups=3) | geometries(max_groups=3, hybrid=True))
    prompts = draw(families_of_prompts(max_units=12))
    steps = []
    for keys in prompts:
        objects = everything(geometry, keys)
        first = draw(st.integers(0, len(objects)))
        steps += [objects[:first], objects[first:]]
    return draw(st.integers(1, 80)), steps


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps_of_prompts())
def test_what_finds_room_one_by_one_finds_it_together(case: tuple[int, list[list[PlannedObject]]]) -> None:
    """What goes for it may be other: room for all is made among what none of them needs."""
    num_units, steps = case
    together, one_by_one = (CpuTierManager(num_units, UNIT, WORLD_SIZE) for _ in range(2))
    for objects in steps:
        planned = [item for item in objects if not together.index.contains(item.object_id)]
        tickets = [ticket for ticket in together.reserve_all(planned) if ticket is not None]
        expected = [ticket for ticket in TierManager.reserve_all(one_by_one, planned) if ticket is not None]
        assert len(expected) < len(planned) or len(tickets) == len(planned)
        together.commit_all([ticket.ticket for ticket in tickets])
        TierManager.commit_all(one_by_one, [ticket.ticket for ticket in expected])
        if set(together.index.visible()) != set(one_by_one.index.visible()):
            return
        assert together.usage().used_bytes == one_by_one.usage().used_bytes


def chain(count: int) -> list[PlannedObject]:
    """Chunks of one unit each, of one prompt."""
    names = [ObjectId("f0", bytes([place])) for place in range(count)]
    return [
        PlannedObject(name, tuple(names[max(0, place - 1) : place]), 64 * place, 64 * place + 64, UNIT)
        for place, name in enumerate(names)
    ]


def store(tier: CpuTierManager, *objects: PlannedObject) -> None:
    for item in objects:
        (ticket,) = tier.reserve_all([item])
        assert ticket is not None
        tier.commit(ticket.ticket)


def test_what_is_there_already_does_not_go_for_the_rest() -> None:
    tier = CpuTierManager(2, UNIT, WORLD_SIZE)
    oldest, other, new = (PlannedObject(ObjectId(f"f{n}", b"x"), (), 0, 64, UNIT) for n in range(3))
    store(tier, oldest, other)
    first, second = tier.reserve_all([new, oldest])
    assert first is not None and second is None
    assert tier.has_or_awaits(oldest.object_id) and not tier.has_or_awaits(other.object_id)


def test_a_parent_does_not_go_for_its_child() -> None:
    tier = CpuTierManager(3, UNIT, WORLD_SIZE)
    parent, *children = chain(3)
    other = PlannedObject(ObjectId("f1", b"x"), (), 0, 64, UNIT)
    store(tier, parent, other)
    assert all(tier.reserve_all(children))
    assert tier.index.has(parent.object_id) and not tier.has_or_awaits(other.object_id)


@pytest.mark.parametrize("at_once", [True, False])
def test_when_one_of_several_cannot_be_reserved_for_an_exception_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    tier = CpuTierManager(8, UNIT, WORLD_SIZE)
    planned = chain(3)
    of_whom, method = (tier.index, "_insert") if at_once else (tier, "reserve")
    reserve = getattr(of_whom, method)

    def fails_at_the_last(item: PlannedObject, *rest: Any) -> Any:
        if item is planned[-1]:
            raise MemoryError
        return reserve(item, *rest)

    monkeypatch.setattr(of_whom, method, fails_at_the_last)
    with pytest.raises(MemoryError):
        (CpuTierManager if at_once else TierManager).reserve_all(tier, planned)
    assert (len(tier.index), tier.usage().used_bytes) == (0, 0)
