# SPDX-License-Identifier: Apache-2.0
"""Whether an index agrees with itself. Each function yields a sentence for every thing that contradicts another."""

from collections.abc import Collection, Iterator, Mapping

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.entry import Entry, EntryState
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.guarded import GuardedPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

_UNPINNED = (EntryState.RESERVED, EntryState.STORED)


def check_integrity(index: PrefixIndex) -> None:
    """Raises AssertionError with the first thing in the index that contradicts another.

    Takes time up to the number of entries times the length of their chains. The capacity is not looked at, because
    ``restore`` may exceed it: ask ``fits(0)``.
    """
    if (sentence := next(_inconsistencies(index), None)) is not None:
        raise AssertionError(sentence)


def _inconsistencies(index: PrefixIndex) -> Iterator[str]:
    entries, in_flight, policy = index._entries, index._in_flight, index._policy
    yield from _of_bytes(entries, index.used_bytes)
    yield from _of_tickets(entries, in_flight)
    for object_id, entry in entries.items():
        if entry.object_id != object_id:
            yield f"{_name(entry)} is in the index as {object_id}"
        yield from _of_pins(entry)
        yield from _of_parents(entries, entry)
        yield from _of_children(entries, entry)
        if entry.state is EntryState.DROPPED:
            yield from _of_a_dropped(entry, in_flight)
        else:
            yield from _of_visibility(entry)
        yield from _of_snapshots(entry)
        yield from _of_the_jump(entry)
    yield from _of_the_policy(entries, policy)


def _name(entry: Entry) -> str:
    return f"{entry.state.name} {entry.object_id}"


def _of_bytes(entries: Mapping[ObjectId, Entry], used_bytes: int) -> Iterator[str]:
    total = sum(entry.num_bytes for entry in entries.values())
    if total != used_bytes:
        yield f"used_bytes is {used_bytes}, but the entries have {total} bytes"


def _of_tickets(entries: Mapping[ObjectId, Entry], in_flight: Mapping[int, Entry]) -> Iterator[str]:
    for ticket, entry in in_flight.items():
        if entry.ticket != ticket:
            yield f"{_name(entry)} of ticket {entry.ticket} is in flight as ticket {ticket}"
        if entries.get(entry.object_id) is not entry:
            yield f"{_name(entry)} is in flight, but not in the index"
        if entry.state not in (EntryState.RESERVED, EntryState.DROPPED):
            yield f"{_name(entry)} is in flight still"
    for entry in entries.values():
        if entry.state is EntryState.RESERVED and in_flight.get(entry.ticket) is not entry:
            yield f"{_name(entry)} waits for ticket {entry.ticket}, which is not in flight"


def _of_pins(entry: Entry) -> Iterator[str]:
    if entry.pins < 0:
        yield f"{_name(entry)} has {entry.pins} pins"
    if entry.pins and entry.state in _UNPINNED:
        yield f"{_name(entry)} is pinned, but was never visible"


def _of_parents(entries: Mapping[ObjectId, Entry], entry: Entry) -> Iterator[str]:
    for parent in entry.parents:
        if entries.get(parent.object_id) is not parent:
            yield f"{_name(entry)} hangs on {_name(parent)}, which is not in the index"
        if entry not in parent.children:
            yield f"{_name(entry)} hangs on {_name(parent)}, which does not have it among its children"


def _of_children(entries: Mapping[ObjectId, Entry], entry: Entry) -> Iterator[str]:
    for child in entry.children:
        if entries.get(child.object_id) is not child:
            yield f"{_name(entry)} has a child {_name(child)}, which is not in the index"
        if entry not in child.parents:
            yield f"{_name(entry)} has a child {_name(child)}, which does not hang on it"


def _of_a_dropped(entry: Entry, in_flight: Mapping[int, Entry]) -> Iterator[str]:
    if entry.parents or entry.children:
        yield f"{_name(entry)} still has parents or children"
    if not entry.pins and in_flight.get(entry.ticket) is not entry:
        yield f"{_name(entry)} is held by neither a ticket nor a pin"


def _of_visibility(entry: Entry) -> Iterator[str]:
    """A stored object is visible exactly when all its parents are."""
    is_reachable = all(parent.state is EntryState.COMMITTED for parent in entry.parents)
    if entry.state is EntryState.COMMITTED and not is_reachable:
        yield f"{_name(entry)} is visible, but a parent is not"
    if entry.state is EntryState.STORED and is_reachable:
        yield f"{_name(entry)} is not visible, but all its parents are"


def _of_snapshots(entry: Entry) -> Iterator[str]:
    visible = [child for child in entry.children if child.state is EntryState.COMMITTED]
    num_snapshots = sum(child.object_id.is_snapshot for child in visible)
    if entry.num_snapshots != num_snapshots:
        yield f"{_name(entry)} counts {entry.num_snapshots} snapshots, but {num_snapshots} are visible"


def _of_the_jump(entry: Entry) -> Iterator[str]:
    """It leads up the chain, and not past a chunk that has snapshots. Where it leads may have none any more."""
    above = _chunk_above(entry)
    while above is not entry.jump:
        if above is None:
            yield f"{_name(entry)} jumps to {entry.jump}, which is not above it"
            return
        if above.num_snapshots:
            yield f"{_name(entry)} jumps past {_name(above)}, which has snapshots"
        above = _chunk_above(above)


def _chunk_above(entry: Entry) -> Entry | None:
    return next((parent for parent in entry.parents if parent.object_id.tag == entry.object_id.tag), None)


def _of_the_policy(entries: Mapping[ObjectId, Entry], policy: EvictionPolicy[Entry]) -> Iterator[str]:
    """It has exactly the entries that may go."""
    if (offered := offered_to(policy)) is None:
        return
    num_evictable = 0
    for entry in entries.values():
        may_go = entry.state is EntryState.COMMITTED and not entry.children and not entry.pins
        num_evictable += may_go
        if may_go != (entry in offered):
            yield f"{_name(entry)} {'may' if may_go else 'must not'} be evicted, but the policy has it otherwise"
    if len(offered) != num_evictable:
        yield f"the policy has {len(offered)} entries, but {num_evictable} may be evicted"


def offered_to(policy: EvictionPolicy[Entry]) -> Collection[Entry] | None:
    """What it has that may be evicted, if it keeps that."""
    match policy:
        case LeastRecentlyUsed():
            return policy._current
        case LearnedEviction() | GuardedPolicy():
            return policy._offered
    return None
