# SPDX-License-Identifier: Apache-2.0
"""The learned policy's naive twin: no runs and no sample. At each eviction it looks at the whole index, chunk by chunk.

For models with states and one full-attention group, whose requests come one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.reuse import ReuseModel, Role, levels_of
from vllm_overlay.tiers.policies.runs import chunk_above


@dataclass
class Record:
    """What is known of one snapshot, or of the prompt that is being stored (``entry`` is None)."""

    entry: Entry | None
    boundary: int
    since: float
    role: Role = Role.END
    num_new: int = 0
    turns: int = 0
    hits: int = 0
    watch: int = -1

    @property
    def levels(self) -> tuple[int, ...]:
        return levels_of(self.role, self.boundary, self.num_new, self.turns, self.hits)


def path_up(chunk: Entry | None) -> list[Entry]:
    """The chunk and all before it, deepest first."""
    found = []
    while chunk is not None:
        found.append(chunk)
        chunk = chunk_above(chunk)
    return found


def chunks_below(chunk: Entry) -> list[Entry]:
    return [child for child in chunk.children if not child.object_id.is_snapshot]


class NaiveLearned(EvictionPolicy[Entry]):
    def __init__(self, clock) -> None:
        self.clock = clock
        self.model = ReuseModel()
        self.offered: dict[Entry, None] = {}
        self.records: dict[Entry, Record] = {}
        self.unfinished: dict[Entry, float] = {}
        """Chunks on which no snapshot was stored yet, with the time at which their prompt began to add chunks."""
        self.ghosts: dict[bytes, Record] = {}
        self.passed: Record | None = None
        self.next_victim: Entry | None = None
        """The chunk before one that went although its prompt was unfinished: such a prompt goes on going."""

    # The tree, as the index has it.

    def snapshots_on(self, chunk: Entry) -> list[Entry]:
        return [child for child in chunk.children if child in self.records]

    def record_above(self, chunk: Entry, passes: Sequence[Role] = ()) -> Record | None:
        for above in path_up(chunk)[1:]:
            found = [r for s in self.snapshots_on(above) if (r := self.records[s]).role not in passes]
            if found:
                return max(found, key=lambda record: record.boundary)
        return None

    def exclusive_bytes(self, chunk: Entry, num_snapshots: int) -> int:
        """Of the chunks that only what ends at ``chunk`` needs."""
        if chunks_below(chunk) or len(self.snapshots_on(chunk)) > num_snapshots:
            return 0
        total = chunk.num_bytes
        for above in path_up(chunk)[1:]:
            if len(chunks_below(above)) > 1 or self.snapshots_on(above):
                break
            total += above.num_bytes
        return total

    # What happens.

    def stored(self, items: Sequence[Entry]) -> None:
        for item in items:
            self.snapshot_stored(item) if item.object_id.is_snapshot else self.chunk_stored(item)

    def chunk_stored(self, item: Entry) -> None:
        above = chunk_above(item)
        self.unfinished[item] = self.unfinished.get(above, self.clock()) if above else self.clock()
        if above is self.next_victim:
            self.next_victim = None
        if item.object_id.key in self.ghosts:
            self.passed = self.ghosts[item.object_id.key]

    def snapshot_stored(self, item: Entry) -> None:
        (chunk,) = item.parents
        record = Record(item, item.end_tokens, self.clock())
        above = self.record_above(chunk)
        later = [deeper for child in chunks_below(chunk) for deeper in self.subtree(child)]
        was_here = chunk not in self.unfinished and not later
        if was_here or any(deeper not in self.unfinished or self.is_forked(deeper) for deeper in later):
            record.role = Role.JUNCTION
        elif above is not None:
            self.continues(above, record)
        record.num_new = record.boundary - (above.boundary if above else 0)
        if above is not None and above.role is Role.SPECULATIVE:
            record.num_new += above.num_new
        self.meets_ghost(chunk, record)
        self.records[item] = record
        for one in path_up(chunk):
            self.unfinished.pop(one, None)
        self.watch(record, record.since)

    def subtree(self, chunk: Entry) -> list[Entry]:
        found, waiting = [], [chunk]
        while waiting:
            one = waiting.pop()
            found.append(one)
            waiting += chunks_below(one)
        return found

    def is_forked(self, chunk: Entry) -> bool:
        return len(chunks_below(chunk)) > 1 or bool(self.snapshots_on(chunk))

    def continues(self, above: Record, record: Record) -> None:
        if above.role is Role.END:
            self.model.cancel(above.role, above.watch)
            above.role = Role.SUPERSEDED if above.hits else Role.SPECULATIVE
            self.watch(above, record.since)
        if above.role is Role.SUPERSEDED:
            record.turns = above.turns + 1
        elif above.role is Role.SPECULATIVE:
            record.turns = above.turns

    def meets_ghost(self, chunk: Entry, record: Record) -> None:
        ghost = self.passed if chunk in self.unfinished else None
        ghost = ghost or self.ghosts.get(chunk.object_id.key)
        self.passed = None
        if ghost is None:
            return
        self.model.end(ghost.role, ghost.watch, record.since)
        if ghost.boundary == record.boundary:
            record.turns, record.hits = ghost.turns, ghost.hits + 1
            if ghost.role is not Role.END:
                record.role = Role.JUNCTION
        elif ghost.role in (Role.END, Role.SUPERSEDED):
            record.turns = ghost.turns + 1
            record.num_new = max(0, record.boundary - ghost.boundary)

    def watch(self, record: Record, now: float) -> None:
        record.since = now
        record.watch = self.model.begin(record.role, record.levels, now)

    def used(self, items: Sequence[Entry]) -> None:
        snapshots = [item for item in items if item in self.records]
        if not snapshots:
            return
        record = self.records[max(snapshots, key=lambda item: item.end_tokens)]
        now = self.clock()
        self.model.end(record.role, record.watch, now)
        record.hits += 1
        if record.role in (Role.SUPERSEDED, Role.SPECULATIVE):
            record.role = Role.JUNCTION
        self.watch(record, now)

    def removed(self, items: Sequence[Entry]) -> None:
        for item in items:
            self.unfinished.pop(item, None)
            record = self.records.pop(item, None)
            if record is not None and record.role is not Role.SPECULATIVE:
                self.ghosts[item.parents[0].object_id.key] = record

    # What may go.

    def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
        self.offered[item] = None

    def discard(self, item: Entry) -> None:
        self.offered.pop(item, None)

    def pop(self) -> Entry | None:
        if not self.offered:
            return None
        useless = [item for item in self.offered if item not in self.records and item not in self.unfinished]
        if useless:
            item = useless[0]
        elif self.next_victim in self.offered and self.next_victim in self.unfinished:
            item = self.next_victim
        else:
            item = min(self.offered, key=lambda one: (self.value(one), -one.end_tokens))
        if item in self.unfinished:
            self.next_victim = chunk_above(item)
        del self.offered[item]
        return item

    def value(self, item: Entry) -> float:
        if item in self.records:
            (chunk,) = item.parents
            record = self.records[item]
            stays = record.role in (Role.END, Role.JUNCTION)
            above = self.record_above(chunk, (Role.SUPERSEDED, Role.SPECULATIVE) if stays else ())
            tokens = record.boundary - (above.boundary if above else 0)
            num_bytes = item.num_bytes + self.exclusive_bytes(chunk, 1)
        else:
            record = Record(None, item.end_tokens, self.unfinished[item])
            num_bytes = self.exclusive_bytes(item, 0)
            run = [one for one in path_up(item) if one in self.unfinished]
            tokens = sum(64 for _ in run)
        level = self.model.level(record.levels)
        return tokens / (num_bytes or 1) * self.model.worth(record.role, level, self.clock() - record.since)
