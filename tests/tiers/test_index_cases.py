# SPDX-License-Identifier: Apache-2.0
"""The prefix-closed index in single cases, of which its twin (test_index.py) says nothing: orders, depths, steps."""

import pytest

from tests.tiers.entries import evict_one
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.entry import EntryState
from vllm_overlay.tiers.index import PrefixIndex


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


def test_what_waited_for_its_parent_becomes_visible_in_the_order_of_its_prompt():
    """A policy that heard of the chunks below a snapshot first would take it for a junction."""
    index = PrefixIndex(None)
    planned = [chunk(0), snapshot_on(0), chunk(1), snapshot_on(1), chunk(2)]
    for ticket, item in enumerate(planned):
        index.reserve(item, ticket)
    assert [index.commit(ticket).visible for ticket in (4, 3, 2, 1)] == [[]] * 4
    assert [entry.object_id for entry in index.commit(0).visible] == [item.object_id for item in planned]


def test_a_ticket_in_flight_cannot_be_used_again():
    index = PrefixIndex(None)
    index.reserve(chunk(0), 1)
    with pytest.raises(ValueError, match="ticket 1 is in flight"):
        index.reserve(chunk(1), 1)


def test_room_is_made_by_as_few_evictions_as_needed_and_not_by_the_parent_of_the_newcomer():
    index = filled(3, capacity=30)
    newcomer = chunk(3, num_bytes=10)
    assert index.evict(10, keep=newcomer.parents) == []
    assert not index.fits(10)
    assert names(index.evict(15)) == [b"a2", b"a1"]
    assert index.evict(31) == []
    assert index.evict(20) == []
    assert len(index) == 1


def test_reports_nobody_waits_for_change_nothing():
    index = filled(2)
    assert index.commit(1) == index.commit(99) == ([], [])
    assert index.abort(1) == index.drop(chunk(7).object_id) == index.unpin([chunk(0).object_id]) == []
    assert (index.used_bytes, len(index)) == (20, 2)


def test_a_load_counts_as_a_use():
    index = PrefixIndex(None)
    index.restore([chunk(0, name="a"), chunk(0, name="b")])
    load = [chunk(0, name="a").object_id]
    index.pin(load)
    index.unpin(load)
    assert names([evict_one(index), evict_one(index)]) == [b"b0", b"a0"]


def test_recovery_waits_for_a_parent_that_is_being_stored_and_leaves_what_is_there_alone():
    index = PrefixIndex(None)
    index.reserve(chunk(0), 1)
    index.restore([chunk(1), chunk(0)], tickets=[7, 8])
    assert not index.has(chunk(1).object_id)
    assert names(index.commit(1).visible) == [b"a0", b"a1"]
    entry = index.get(chunk(1).object_id)
    assert entry is not None and (entry.ticket, entry.state) == (7, EntryState.COMMITTED)


def test_recovered_objects_age_in_the_order_given():
    index = PrefixIndex(None)
    index.restore([chunk(0, name=name) for name in "cab"])
    assert names([evict_one(index) for _ in range(3)]) == [b"c0", b"a0", b"b0"]


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
    index.restore(chunks)
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
