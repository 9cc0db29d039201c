# SPDX-License-Identifier: Apache-2.0
"""The prefix-closed index: every order of stores, loads, evictions and drops, held to its naive twin."""

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.naive_twin import NaiveIndex, nearest_snapshot_chunk
from tests.strategies import everything, families_of_prompts, geometries, naive_of
from tests.tiers.entries import entries_of
from tests.tiers.policies.structure import check_runs
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.entry import Entry, EntryState
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed


class IndexMachine(RuleBasedStateMachine):
    """Does the same to index and twin. ``bytes_out`` are the entries not released yet, so that none can be twice."""

    def new_policy(self, geometry: Geometry) -> EvictionPolicy[Entry]:
        return LeastRecentlyUsed[Entry]()

    @initialize(
        geometry=geometries(max_groups=4) | geometries(max_groups=4, hybrid=True),
        prompts=families_of_prompts(max_units=12),
        capacity=st.none() | st.integers(20, 600),
    )
    def start(self, geometry, prompts, capacity):
        self.geometry, self.prompts = geometry, prompts
        self.objects = list({item.object_id: item for keys in prompts for item in everything(geometry, keys)}.values())
        self.policy = self.new_policy(geometry)
        self.index, self.twin = PrefixIndex(capacity, self.policy), NaiveIndex(capacity)
        self.capacity_respected = True
        self.tickets: list[int] = []
        self.pinned: list[list[Entry]] = []
        self.bytes_out: dict[int, Entry] = {}

    def released(self, entries: list[Entry], expected: set[ObjectId]) -> None:
        assert {entry.object_id for entry in entries} == expected
        assert len(entries) == len(expected)
        for entry in entries:
            assert self.bytes_out.pop(id(entry)) is entry

    @rule(data=st.data(), count=st.integers(1, 12))
    def reserve(self, data, count):
        """A run of objects in parents-first order, from anywhere in the list."""
        if not self.objects:
            return
        first = data.draw(st.integers(0, len(self.objects) - 1))
        for item in self.objects[first : first + count]:
            self.reserve_one(item)

    def reserve_one(self, item: PlannedObject) -> None:
        ticket = len(self.tickets) + 1
        assert self.index.may_reserve(item) == self.twin.may_reserve(item)
        entry = self.index.reserve(item, ticket, units=(ticket,))
        assert (entry is not None) == self.twin.reserve(item, ticket)
        self.tickets.append(ticket)
        if entry is not None:
            assert (entry.ticket, entry.units) == (ticket, (ticket,))
            self.bytes_out[id(entry)] = entry

    def commit_one(self, ticket: int) -> None:
        done = self.index.commit(ticket)
        visible, released = self.twin.commit(ticket)
        assert sorted(entry.object_id for entry in done.visible) == sorted(visible)
        self.released(done.released, released)

    @rule(data=st.data(), density=st.sampled_from([0.3, 0.9, 1.0]), commits=st.sampled_from([0.5, 1.0]))
    def store_a_prompt(self, data, density, commits):
        """Most of a prompt's objects, of which most are committed, in any order."""
        luck = random.Random(data.draw(st.integers(0, 1 << 16)))
        wanted = everything(self.geometry, data.draw(st.sampled_from(self.prompts)))
        first = len(self.tickets)
        for item in wanted:
            if item.object_id.tag.startswith("f") or luck.random() < density:
                self.reserve_one(item)
        tickets = [ticket for ticket in self.tickets[first:] if luck.random() < commits]
        luck.shuffle(tickets)
        for ticket in tickets:
            self.commit_one(ticket)

    @rule(data=st.data(), density=st.sampled_from([0.3, 0.9]))
    def compute_a_prompt(self, data, density):
        """Chunks and some snapshots in the order of their tokens, each committed before the next."""
        luck = random.Random(data.draw(st.integers(0, 1 << 16)))
        wanted = everything(self.geometry, data.draw(st.sampled_from(self.prompts)))
        for item in sorted(wanted, key=lambda item: (item.end_tokens, item.object_id.is_snapshot)):
            if not item.object_id.is_snapshot or luck.random() < density:
                self.reserve_one(item)
                self.commit_one(self.tickets[-1])

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), count=st.integers(1, 12))
    def commit(self, data, count):
        tickets = data.draw(st.lists(st.sampled_from(self.tickets), min_size=count, max_size=count))
        for ticket in tickets:
            self.commit_one(ticket)

    @rule()
    def commit_all_last_first(self):
        for ticket in reversed(self.tickets):
            self.commit_one(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def abort(self, data):
        ticket = data.draw(st.sampled_from(self.tickets))
        self.released(self.index.abort(ticket), self.twin.abort(ticket))

    def some_names(self, data, max_size=4) -> list[ObjectId]:
        here = [item.object_id for item in self.objects if item.object_id in self.twin.records]
        pool = data.draw(st.sampled_from([here or [ObjectId("f9", b"?")], [i.object_id for i in self.objects] or here]))
        return data.draw(st.lists(st.sampled_from(pool), max_size=max_size)) if pool else []

    @rule(data=st.data())
    def pin(self, data):
        names = self.some_names(data)
        entries = self.index.pin(names)
        assert (entries is not None) == self.twin.pin(names)
        if entries is not None:
            assert [entry.object_id for entry in entries] == names
            self.pinned.append(entries)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        entries = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        names = [entry.object_id for entry in entries]
        self.released(self.index.unpin(names), self.twin.unpin(names))

    @rule(data=st.data())
    def touch(self, data):
        names = self.some_names(data)
        self.index.touch(names)
        self.twin.touch(names)

    @rule(data=st.data())
    def drop(self, data):
        for name in self.some_names(data, max_size=1):
            self.released(self.index.drop(name), self.twin.drop(name))

    @precondition(lambda self: any(self.pinned))
    @rule(data=st.data())
    def drop_what_is_pinned(self, data):
        entry = data.draw(st.sampled_from([entries for entries in self.pinned if entries]))[0]
        self.released(self.index.drop(entry.object_id), self.twin.drop(entry.object_id))

    @rule(num_bytes=st.integers(0, 200), data=st.data())
    def evict(self, num_bytes, data):
        keep = self.some_names(data, max_size=2)
        evicted = self.index.evict(num_bytes, keep)
        for entry in evicted:
            assert not self.index_fits_in_twin(num_bytes)
            self.check_victim(entry, keep)
        impossible = self.index.capacity_bytes is not None and num_bytes > self.index.capacity_bytes
        assert self.index.fits(num_bytes) or impossible or not self.twin.evictable() - set(keep)
        assert not (impossible and evicted)

    def index_fits_in_twin(self, num_bytes):
        return self.twin.capacity is None or self.twin.used_bytes() + num_bytes <= self.twin.capacity

    @rule(data=st.data())
    def evict_one(self, data):
        keep = self.some_names(data, max_size=2)
        entry = self.index.evict_one(keep)
        if entry is None:
            assert not self.twin.evictable() - set(keep)
        else:
            self.check_victim(entry, keep)

    def check_victim(self, entry, keep):
        """It may go, it is the oldest that may, and it goes."""
        candidates = self.twin.evictable() - set(keep)
        assert entry.object_id in candidates
        self.check_order(entry, candidates)
        self.released([entry], self.twin.drop(entry.object_id))

    def check_order(self, entry, candidates):
        assert self.twin.age(entry.object_id) == min(map(self.twin.age, candidates))

    @rule(data=st.data())
    def restore(self, data):
        """A restart of the tier found some objects, in any order, some of them twice."""
        if not self.objects:
            return
        found = data.draw(st.lists(st.sampled_from(self.objects), max_size=8))
        assert sorted(self.index.restore(found), key=str) == sorted(self.twin.restore(found), key=str)
        self.capacity_respected = False
        for item in found:
            entry = entries_of(self.index).get(item.object_id)
            if entry is not None and entry.ticket == 0:
                self.bytes_out[id(entry)] = entry

    @rule()
    def clear(self):
        expected = set()
        for name in list(self.twin.records):
            expected |= self.twin.drop(name)
        self.released(self.index.clear(), expected)

    @rule(data=st.data())
    def look_up(self, data):
        keys = data.draw(st.sampled_from(self.prompts))
        num_tokens = len(keys) * self.geometry.match_unit
        found = HybridOffloadPlanner(self.geometry).lookup(keys, num_tokens, 0, self.index)
        expected = naive_of(self.geometry).lookup(keys, num_tokens, 0, self.twin.visible())
        assert (found.restore_point, found.junction, found.limited_by, found.limiting_group_id) == expected

    @invariant()
    def visible_objects_are_the_twins_and_prefix_closed(self):
        visible = self.twin.visible()
        assert {item.object_id for item in self.objects if self.index.has(item.object_id)} == visible
        assert all(self.index.has(parent) for name in visible for parent in self.twin.parents_of(name))

    @invariant()
    def bytes_add_up_and_stay_within_the_capacity(self):
        assert self.index.used_bytes == self.twin.used_bytes()
        assert len(self.index) == len(self.twin.records) == len(self.bytes_out)
        if self.capacity_respected:
            assert self.index.fits(0)

    @invariant()
    def index_agrees_with_itself(self):
        self.index.check_integrity()

    @invariant()
    def pinned_bytes_are_still_there(self):
        for entry in itertools.chain.from_iterable(self.pinned):
            assert entry.pins
            assert self.bytes_out[id(entry)] is entry

    @invariant()
    def exactly_the_evictable_are_offered(self):
        assert len(self.policy) == len(self.twin.evictable())
        assert {entry.object_id for entry in entries_of(self.index).values() if entry in self.policy} == (
            self.twin.evictable()
        )

    @invariant()
    def snapshots_are_found_from_every_chunk(self):
        visible = self.twin.visible()
        parents = {name: self.twin.parents_of(name) for name in visible}
        ends = {name: self.twin.records[name].planned.end_tokens for name in visible}
        for item in self.objects:
            if item.object_id.tag.startswith("f"):
                expected = nearest_snapshot_chunk(item.object_id, visible, parents, ends)
                assert self.index.nearest_snapshot_chunk(item.object_id) == expected


class LearnedIndexMachine(IndexMachine):
    """With a policy that keeps a structure of its own over the index: its victims may go, and it agrees with itself."""

    def new_policy(self, geometry: Geometry) -> EvictionPolicy[Entry]:
        self.now = 0.0
        policy = LearnedEviction(lambda: self.now)
        policy.serve(geometry)
        return policy

    @rule(seconds=st.sampled_from([0.5, 30.0, 5000.0]))
    def time_passes(self, seconds):
        self.now += seconds

    def check_order(self, entry, candidates):
        """tests/tiers/policies has what goes first."""

    @invariant()
    def policy_agrees_with_the_index(self):
        check_runs(self.index, self.policy)


for machine in (IndexMachine, LearnedIndexMachine):
    machine.TestCase.settings = settings(
        max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestIndexAgainstItsTwin = IndexMachine.TestCase
TestIndexWithALearnedPolicy = LearnedIndexMachine.TestCase


def chunk(position: int, num_bytes: int = 10, name: str = "a") -> PlannedObject:
    """The ``position``-th chunk of 64 tokens of prompt ``name``."""
    parents = (ObjectId("f0", f"{name}{position - 1}".encode()),) if position else ()
    object_id = ObjectId("f0", f"{name}{position}".encode())
    return PlannedObject(object_id, parents, 64 * position, 64 * position + 64, num_bytes, 0)


def snapshot_on(position: int, num_bytes: int = 10, name: str = "a") -> PlannedObject:
    """A snapshot at the end of that chunk."""
    above = chunk(position, name=name)
    object_id = ObjectId("s", above.object_id.key)
    return PlannedObject(object_id, (above.object_id,), above.end_tokens, above.end_tokens, num_bytes)


def names(objects) -> list[bytes]:
    return [item.object_id.key for item in objects]


def filled(count: int, capacity: int | None = None) -> PrefixIndex:
    """An index with the first ``count`` chunks of prompt a, stored under tickets 1, 2, ..."""
    index = PrefixIndex(capacity)
    for position in range(count):
        assert index.reserve(chunk(position), position + 1, units=(position,)) is not None
        index.commit(position + 1)
    return index


def test_a_child_that_is_stored_first_waits_for_its_parent():
    index = PrefixIndex(None)
    for position in range(3):
        index.reserve(chunk(position), position + 1)
    assert index.commit(3).visible == index.commit(2).visible == []
    assert index.get(chunk(2).object_id) is None
    assert names(index.commit(1).visible) == [b"a0", b"a1", b"a2"]


def test_an_object_without_its_parent_or_there_already_or_too_large_is_not_reserved():
    index = filled(2, capacity=35)
    assert index.reserve(chunk(3), 10) is None
    assert index.reserve(chunk(1), 10) is None
    assert index.reserve(chunk(2, num_bytes=16), 10) is None
    assert index.reserve(chunk(2, num_bytes=15), 10) is not None
    assert index.reserve(chunk(2), 11) is None
    assert (index.used_bytes, len(index)) == (35, 3)


def test_a_ticket_in_flight_cannot_be_used_again():
    index = PrefixIndex(None)
    index.reserve(chunk(0), 1)
    with pytest.raises(ValueError, match="ticket 1 is in flight"):
        index.reserve(chunk(1), 1)


def test_only_snapshots_that_can_be_loaded_are_found_from_above():
    index = filled(5)
    other = PlannedObject(ObjectId("s", b"other"), snapshot_on(1).parents, 128, 160, 10)
    for ticket, item in enumerate([snapshot_on(1), other, snapshot_on(3)], start=10):
        index.reserve(item, ticket)
    assert index.nearest_snapshot_chunk(chunk(4).object_id) == 0
    index.commit(10)
    assert index.nearest_snapshot_chunk(chunk(4).object_id) == 128
    index.abort(11)
    index.abort(12)
    assert index.nearest_snapshot_chunk(chunk(4).object_id) == 128
    index.drop(snapshot_on(1).object_id)
    assert index.nearest_snapshot_chunk(chunk(4).object_id) == 0


def test_reports_nobody_waits_for_change_nothing():
    index = filled(2)
    assert index.commit(1) == index.commit(99) == ([], [])
    assert index.abort(1) == index.drop(chunk(7).object_id) == index.unpin([chunk(0).object_id]) == []
    assert (index.used_bytes, len(index)) == (20, 2)


def test_an_aborted_store_takes_what_was_planned_on_top_when_its_own_tickets_end():
    index = PrefixIndex(None)
    for position in range(4):
        index.reserve(chunk(position), position + 1)
    index.commit(4)
    assert sorted(names(index.abort(1))) == [b"a0", b"a3"]
    assert index.used_bytes == 20
    assert index.reserve(chunk(1), 9) is None
    assert names(index.commit(2).released) == [b"a1"]
    assert names(index.abort(3)) == [b"a2"]
    assert (index.used_bytes, len(index)) == (0, 0)


def test_a_dropped_object_is_invisible_at_once_and_its_bytes_stay_until_the_last_load_ends():
    index = filled(3)
    load = [chunk(position).object_id for position in range(3)]
    assert index.pin(load) is not None and index.pin(load[1:2]) is not None
    assert index.drop(load[1]) == []
    assert [index.has(name) for name in load] == [True, False, False]
    assert index.pin(load) is None
    assert index.reserve(chunk(1), 9) is None
    assert [entry.units for entry in index.unpin(load)] == [(2,)]
    assert [entry.units for entry in index.unpin(load[1:2])] == [(1,)]
    assert index.used_bytes == 10
    assert index.reserve(chunk(1), 9) is not None


def test_leaves_go_first_and_the_deepest_of_those_used_together():
    index = filled(3)
    index.reserve(chunk(0, name="b"), 9)
    index.commit(9)
    index.touch([chunk(position).object_id for position in range(3)])
    order = [index.evict_one() for _ in range(4)]
    assert names(order) == [b"b0", b"a2", b"a1", b"a0"]
    assert index.evict_one() is None


def test_room_is_made_by_as_few_evictions_as_needed_and_not_by_the_parent_of_the_newcomer():
    index = filled(3, capacity=30)
    newcomer = chunk(3, num_bytes=10)
    assert index.evict(10, keep=newcomer.parents) == []
    assert not index.fits(10)
    assert names(index.evict(15)) == [b"a2", b"a1"]
    assert index.evict(31) == []
    assert index.evict(20) == []
    assert len(index) == 1


def test_nothing_pinned_is_evicted():
    index = filled(3)
    index.pin([chunk(1).object_id])
    assert names([index.evict_one()]) == [b"a2"]
    assert index.evict_one() is None
    index.unpin([chunk(1).object_id])
    assert names([index.evict_one()]) == [b"a1"]


def test_a_load_counts_as_a_use():
    index = PrefixIndex(None)
    index.restore([chunk(0, name="a"), chunk(0, name="b")])
    load = [chunk(0, name="a").object_id]
    index.pin(load)
    index.unpin(load)
    assert names([index.evict_one(), index.evict_one()]) == [b"b0", b"a0"]


def test_recovery_takes_any_order_and_returns_what_cannot_be_reached():
    index = PrefixIndex(None)
    found = [chunk(2), snapshot_on(1), chunk(0), chunk(1), chunk(4), snapshot_on(4), chunk(2)]
    assert index.restore(found) == [chunk(4), snapshot_on(4)]
    assert index.nearest_snapshot_chunk(chunk(2).object_id) == 128
    assert (len(index), index.used_bytes) == (4, 40)


def test_recovery_waits_for_a_parent_that_is_being_stored_and_leaves_what_is_there_alone():
    index = PrefixIndex(None)
    index.reserve(chunk(0), 1)
    assert index.restore([chunk(1), chunk(0)], ticket=7) == []
    assert not index.has(chunk(1).object_id)
    assert names(index.commit(1).visible) == [b"a0", b"a1"]
    entry = index.get(chunk(1).object_id)
    assert entry is not None and (entry.ticket, entry.state) == (7, EntryState.COMMITTED)


def test_recovered_objects_age_in_the_order_given():
    index = PrefixIndex(None)
    assert index.restore([chunk(0, name=name) for name in "cab"]) == []
    assert names([index.evict_one() for _ in range(3)]) == [b"c0", b"a0", b"b0"]


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 9), st.integers(0, 5))))
def test_the_policy_pops_the_longest_unused_and_deepest(steps):
    policy, model = LeastRecentlyUsed[int](), {}
    for verb, item, last_use in steps * 20:
        if verb == "add":
            policy.add(item, last_use, item)
            model[item] = (last_use, -item)
        elif verb == "discard":
            policy.discard(item)
            model.pop(item, None)
        else:
            oldest = min(model, key=model.__getitem__) if model else None
            assert policy.pop() == oldest
            model.pop(oldest, None)
        assert len(policy) == len(model)
        assert {item for item in range(10) if item in policy} == set(model)
        assert len(policy._heap) <= 2 * len(model) + 64


NUM_DEEP = 100_000


def test_a_chain_of_a_hundred_thousand_chunks_is_handled_without_recursion():
    """Anything quadratic would take hours."""
    chunks = [chunk(position) for position in range(NUM_DEEP)]
    tickets = list(range(1, NUM_DEEP + 1))
    index = PrefixIndex(None)
    for ticket, item in zip(tickets, chunks, strict=True):
        index.reserve(item, ticket)
    for ticket in reversed(tickets):
        index.commit(ticket)
    assert index.has(chunks[-1].object_id)
    assert index.nearest_snapshot_chunk(chunks[-1].object_id) == 0
    for position in (500, 50_000, 10):
        index.reserve(snapshot_on(position), NUM_DEEP + 1)
        index.commit(NUM_DEEP + 1)
    assert index.nearest_snapshot_chunk(chunks[-1].object_id) == 64 * 50_001
    index.drop(snapshot_on(50_000).object_id)
    assert index.nearest_snapshot_chunk(chunks[-1].object_id) == 64 * 501
    assert len(index.drop(chunks[1000].object_id)) == NUM_DEEP - 1000
    shuffled = random.Random(7).sample(chunks, NUM_DEEP)
    assert index.restore(shuffled) == []
    assert index.has(chunks[-1].object_id)
    assert len(index.clear()) == NUM_DEEP + 2


@pytest.mark.parametrize("length", [1_000, 32_000])
def test_asking_for_snapshots_again_and_again_takes_no_longer_on_longer_chains(length):
    """Steps are counted, not seconds: a path once walked is short."""
    index = filled(length)
    for position in range(0, length, 100):
        index.reserve(snapshot_on(position), length + 1)
        index.commit(length + 1)
    for position in range(100, length, 100):
        index.drop(snapshot_on(position).object_id)
    last = chunk(length - 1).object_id
    assert index.nearest_snapshot_chunk(last) == 64
    entry, steps = index.get(last), 0
    while entry is not None and not entry.num_snapshots:
        entry, steps = entry.jump, steps + 1
    assert steps == 1
