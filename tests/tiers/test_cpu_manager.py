# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's scheduler half: every order of stores, loads, drops and resets keeps its index and its units right."""

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.strategies import everything, families_of_prompts, geometries
from tests.tiers.entries import entries_of
from vllm_overlay.tiers.base import LoadTicket
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
        self.tier.release([ticket.object_id for ticket in load])

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
        self.tier.index.check_integrity()
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
