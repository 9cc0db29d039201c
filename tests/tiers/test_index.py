# SPDX-License-Identifier: Apache-2.0
"""The prefix-closed index: every order of stores, loads, evictions and drops, held to its naive twin."""

import itertools
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.naive_twin import NaiveIndex, nearest_snapshot_chunk
from tests.strategies import everything, families_of_prompts, geometries, naive_of
from tests.tiers.entries import entries_of, evict_one
from tests.tiers.integrity import check_integrity, offered_to
from tests.tiers.policies.structure import check_runs
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.entry import Entry
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
        entry = evict_one(self.index, keep)
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
        self.index.restore(found)
        self.twin.restore(found)
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
        check_integrity(self.index)

    @invariant()
    def pinned_bytes_are_still_there(self):
        for entry in itertools.chain.from_iterable(self.pinned):
            assert entry.pins
            assert self.bytes_out[id(entry)] is entry

    @invariant()
    def exactly_the_evictable_are_offered(self):
        if (offered := offered_to(self.policy)) is not None:
            assert {entry.object_id for entry in offered} == self.twin.evictable()

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
