# SPDX-License-Identifier: Apache-2.0
"""The naive twins of planner and index: slow, obvious, recomputed from scratch. What the fast ones are held to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.geometry import Group, GroupKind
from vllm_overlay.planner.objects import ObjectId, PlannedObject


def block_hashes(symbols: Sequence[int]) -> list[bytes]:
    """Chained names of the match units of a prompt, one symbol a unit: each stands for everything before it."""
    return [bytes(symbols[: i + 1]) for i in range(len(symbols))]


class NaivePlanner:
    """Looks at every boundary and at every object it would need."""

    def __init__(self, groups: Sequence[Group], match_unit: int, chunk_size: int) -> None:
        self.unit = match_unit
        self.chunk = chunk_size
        self.attention = [group for group in groups if group.kind is not GroupKind.RECURRENT]
        self.has_states = len(self.attention) < len(groups)

    def is_cut(self, group: Group) -> bool:
        return group.sliceable and group.block_size % self.chunk == 0

    def size(self, group: Group) -> int:
        return self.chunk if self.is_cut(group) else group.block_size

    def name(self, keys: Sequence[bytes], group: Group, end: int) -> ObjectId:
        letter = "f" if group.kind is GroupKind.FULL else "w"
        return ObjectId(f"{letter}{self.attention.index(group)}", keys[end // self.unit - 1])

    def is_restore_point(self, boundary: int) -> bool:
        if boundary < 1 or boundary % self.unit:
            return False
        if self.has_states:
            return all(self.is_cut(group) or boundary % group.block_size == 0 for group in self.attention)
        return all(boundary % self.size(group) == 0 for group in self.attention)

    def chunk_ends(self, group: Group, boundary: int, num_local: int) -> list[int]:
        """Ends of the chunks that ``group`` has to load: they have a token visible at ``boundary`` and not local."""
        size = self.size(group)
        ends = range(size, boundary + 1, size)
        if group.kind is GroupKind.FULL:
            return [end for end in ends if end > num_local]
        first_visible = boundary - (boundary % group.window if group.is_chunked else group.window - 1)
        first_needed = first_visible - first_visible % group.block_size  # vLLM takes its whole block for computed
        return [end for end in ends if end - 1 >= first_needed and end > num_local]

    def needs(self, keys: Sequence[bytes], boundary: int, num_local: int) -> list[ObjectId]:
        """Everything to load to go on at ``boundary``."""
        groups = sorted(self.attention, key=lambda group: group.kind is GroupKind.WINDOW)
        names = [self.name(keys, g, end) for g in groups for end in self.chunk_ends(g, boundary, num_local)]
        return names + ([ObjectId("s", keys[boundary // self.unit - 1])] if self.has_states else [])

    def leading_tokens(self, keys: Sequence[bytes], group: Group, limit: int, held: set[ObjectId]) -> int:
        end = 0
        while end + self.size(group) <= limit and self.name(keys, group, end + self.size(group)) in held:
            end += self.size(group)
        return end

    def lookup(
        self, keys: Sequence[bytes], num_tokens: int, num_local: int, held: set[ObjectId]
    ) -> tuple[int, int, Reason, int | None]:
        """Restore point, junction, what limited it, and which group that was."""
        limit = max(0, min(num_tokens - 1, len(keys) * self.unit))
        boundaries = [b for b in range(limit, 0, -1) if self.is_restore_point(b)]
        restorable = [b for b in boundaries if b > num_local and set(self.needs(keys, b, num_local)) <= held]
        point = max(restorable, default=0)
        full = [group for group in self.attention if group.kind is GroupKind.FULL]
        covered = {group.group_id: self.leading_tokens(keys, group, limit, held) for group in full}
        reach = max((b for b in boundaries if b <= min(covered.values(), default=0)), default=0)
        reached = max(point, num_local)
        junction = reach if self.has_states and reach > reached else 0
        return point, junction, *self.reason(keys, limit, num_local, reached, boundaries, covered, reach, held)

    def reason(
        self,
        keys: Sequence[bytes],
        limit: int,
        num_local: int,
        reached: int,
        boundaries: list[int],
        covered: dict[int, int],
        reach: int,
        held: set[ObjectId],
    ) -> tuple[Reason, int | None]:
        if not any(b > reached for b in boundaries):
            if limit < self.unit:
                return Reason.NONE, None
            return (Reason.GRANULARITY if limit - reached >= self.unit else Reason.PROMPT_END), None
        for boundary in boundaries:
            if boundary > reached:
                missing = [name for name in self.needs(keys, boundary, num_local) if name not in held]
                if all(name.tag.startswith("w") for name in missing):
                    return Reason.WINDOW, self.attention[int(missing[0].tag[1:])].group_id
        if covered and reached >= reach:
            return Reason.ATTENTION, next(g for g in covered if covered[g] == min(covered.values()))
        return Reason.STATE, None


class SetView:
    """A tier that is a set of names."""

    def __init__(
        self, held: Iterable[ObjectId], parents: dict[ObjectId, tuple[ObjectId, ...]], ends: dict[ObjectId, int]
    ) -> None:
        self.held, self.parents, self.ends = set(held), parents, ends
        self.evicted: set[ObjectId] = set()

    def has(self, object_id: ObjectId) -> bool:
        return object_id in self.held

    def nearest_snapshot_chunk(self, object_id: ObjectId) -> int:
        return nearest_snapshot_chunk(object_id, self.held, self.parents, self.ends)

    def was_evicted(self, object_id: ObjectId) -> bool:
        return object_id in self.evicted


def nearest_snapshot_chunk(
    object_id: ObjectId, held: set[ObjectId], parents: dict[ObjectId, tuple[ObjectId, ...]], ends: dict[ObjectId, int]
) -> int:
    """Walks up from one chunk to the next, asking every snapshot whether it hangs there."""
    chain: ObjectId | None = object_id if object_id in held else None
    while chain is not None:
        if any(chain in parents[name] for name in held if name.tag == "s"):
            return ends[chain]
        chain = next((parent for parent in parents[chain] if parent.tag == chain.tag), None)
    return 0


@dataclass
class Record:
    planned: PlannedObject
    ticket: int
    last_use: int
    written: bool = False
    dropped: bool = False
    pins: int = 0


@dataclass
class NaiveIndex:
    """One record a name; what is visible or on top of what is worked out anew at every question."""

    capacity: int | None
    records: dict[ObjectId, Record] = field(default_factory=dict)
    clock: int = 0

    def used_bytes(self) -> int:
        return sum(record.planned.num_bytes for record in self.records.values())

    def parents_of(self, name: ObjectId) -> tuple[ObjectId, ...]:
        return self.records[name].planned.parents

    def visible(self) -> set[ObjectId]:
        seen: set[ObjectId] = set()
        while True:
            more = {
                name
                for name, record in self.records.items()
                if record.written and not record.dropped and set(record.planned.parents) <= seen
            }
            if more == seen:
                return seen
            seen = more

    def on_top_of(self, root: ObjectId) -> set[ObjectId]:
        """``root`` and everything live that depends on it."""
        tree = {root}
        while True:
            more = tree | {
                name
                for name, record in self.records.items()
                if not record.dropped and tree.intersection(record.planned.parents)
            }
            if more == tree:
                return tree
            tree = more

    def may_reserve(self, planned: PlannedObject) -> bool:
        here = {name for name, record in self.records.items() if not record.dropped}
        return planned.object_id not in self.records and set(planned.parents) <= here

    def reserve(self, planned: PlannedObject, ticket: int) -> bool:
        full = self.capacity is not None and self.used_bytes() + planned.num_bytes > self.capacity
        if full or not self.may_reserve(planned):
            return False
        self.clock += 1
        self.records[planned.object_id] = Record(planned, ticket, self.clock)
        return True

    def in_flight(self, ticket: int) -> Record | None:
        return next((r for r in self.records.values() if r.ticket == ticket and not r.written), None)

    def commit(self, ticket: int) -> tuple[set[ObjectId], set[ObjectId]]:
        before = self.visible()
        if (record := self.in_flight(ticket)) is not None:
            record.written = True
        return self.visible() - before, self.collect()

    def abort(self, ticket: int) -> set[ObjectId]:
        if (record := self.in_flight(ticket)) is None:
            return set()
        record.written = True
        return self.drop(record.planned.object_id)

    def drop(self, name: ObjectId) -> set[ObjectId]:
        if name in self.records:
            for doomed in self.on_top_of(name):
                self.records[doomed].dropped = True
        return self.collect()

    def collect(self) -> set[ObjectId]:
        """Removes and returns what was dropped and is held by neither a ticket nor a pin."""
        gone = {name for name, r in self.records.items() if r.dropped and r.written and not r.pins}
        for name in gone:
            del self.records[name]
        return gone

    def pin(self, names: Sequence[ObjectId]) -> bool:
        if not set(names) <= self.visible():
            return False
        self.clock += 1
        for name in names:
            self.records[name].pins += 1
            self.records[name].last_use = self.clock
        return True

    def unpin(self, names: Sequence[ObjectId]) -> set[ObjectId]:
        for name in names:
            if name in self.records and self.records[name].pins:
                self.records[name].pins -= 1
        return self.collect()

    def touch(self, names: Sequence[ObjectId]) -> None:
        self.clock += 1
        for name in self.visible().intersection(names):
            self.records[name].last_use = self.clock

    def evictable(self) -> set[ObjectId]:
        return {name for name in self.visible() if not self.records[name].pins and self.on_top_of(name) == {name}}

    def age(self, name: ObjectId) -> tuple[int, int]:
        """Evict the smallest first."""
        record = self.records[name]
        return record.last_use, -record.planned.end_tokens

    def restore(self, planned: Sequence[PlannedObject]) -> None:
        for item in planned:
            self.clock += 1
            if self.may_reserve(item):
                self.records[item.object_id] = Record(item, 0, self.clock, written=True)
