# SPDX-License-Identifier: Apache-2.0
"""Finds what other processes stored in our namespace since we started, prompt by prompt as lookups miss."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar

from vllm_overlay.planner.coverage import CoverageSearch
from vllm_overlay.planner.objects import ObjectId, ObjectKind, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.listing import read_planned
from vllm_overlay.tiers.disk.namespace import DiskNamespace
from vllm_overlay.tiers.disk.object_file import BadObject
from vllm_overlay.tiers.disk.thread_pool import ThreadPool

ANSWER_S = 5.0
"""For so long the answer for a prompt holds, and the file system is not asked again."""
SHUN_S = 60.0
"""For so long an object that did not load is not found again, and one that could not be read is not offered."""
_MAX_ANSWERS = 4096
_MAX_PENDING = 64
_MAX_PROBES = 4096
_MAX_SEARCHES = 4
_JOIN_S = 1.0
_ORDER = {kind: place for place, kind in enumerate(ObjectKind)}
_NameT = TypeVar("_NameT", bound=Hashable)


class Recent(Generic[_NameT]):
    """Names of the last ``seconds``, at most ``_MAX_ANSWERS`` of them. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._added: OrderedDict[_NameT, float] = OrderedDict()

    def add(self, name: _NameT) -> None:
        self._added[name] = time.monotonic()
        self._added.move_to_end(name)
        if len(self._added) > _MAX_ANSWERS:
            self._added.popitem(last=False)

    def discard(self, name: _NameT) -> None:
        self._added.pop(name, None)

    def __contains__(self, name: _NameT) -> bool:
        added = self._added.get(name)
        return added is not None and time.monotonic() - added < self._seconds

    def names(self) -> frozenset[_NameT]:
        """All of them."""
        while self._added and (oldest := next(iter(self._added))) not in self:
            del self._added[oldest]
        return frozenset(self._added)


class _FilesView:
    """The planner's questions answered by the headers of files. Every chunk may have snapshots: only they tell.

    After ``_MAX_PROBES`` objects it says no to everything, which finds less and nothing wrong.
    """

    def __init__(self, read: Callable[[ObjectId], PlannedObject | None], ends: dict[bytes, int]) -> None:
        self._read = read
        self._ends = ends
        self._answers: dict[ObjectId, PlannedObject | None] = {}
        self._gaps: dict[str, int] = {}

    def get(self, object_id: ObjectId) -> PlannedObject | None:
        if object_id not in self._answers:
            may_ask = len(self._answers) < _MAX_PROBES
            self._answers[object_id] = self._read(object_id) if may_ask else None
        return self._answers[object_id]

    def has(self, object_id: ObjectId) -> bool:
        gap = self._gaps.get(object_id.tag)
        return (gap is None or self._ends[object_id.key] < gap) and self.get(object_id) is not None

    def nearest_snapshot_chunk(self, object_id: ObjectId) -> int:
        return self._ends[object_id.key]

    def mark_gap(self, item: PlannedObject) -> None:
        """A binary search ran over a missing chunk: whatever ends there or later is not there."""
        self._gaps[item.object_id.tag] = item.end_tokens


class AsyncLookup:
    """One a DiskTierManager, with one thread. Lookups after the answer find what it found; none waits for it."""

    def __init__(
        self, root: str, namespace: DiskNamespace, world_size: int, device: Device, integrity: Integrity = XXH3
    ) -> None:
        self._root = root
        self._namespace = namespace
        self._world_size = world_size
        self._device = device
        self._integrity = integrity
        self._lock = threading.Lock()
        self._asked: Recent[tuple[bytes, int, int]] = Recent(ANSWER_S)
        self._shunned: Recent[ObjectId] = Recent(SHUN_S)
        self._num_pending = 0
        self._found: deque[PlannedObject] = deque()
        self._is_stopped = False
        self._pool = ThreadPool("disk-lookup", 1)

    # From the scheduler's thread.

    def ask(self, planner: HybridOffloadPlanner, keys: Sequence[bytes], num_tokens: int, num_known: int) -> None:
        """Look for what would restore this prompt beyond ``num_known`` tokens, unless that was asked just now."""
        if not keys or self._is_stopped:
            return
        name = keys[-1], num_tokens, num_known
        with self._lock:
            if name in self._asked or self._num_pending >= _MAX_PENDING:
                return
            self._asked.add(name)
            self._num_pending += 1
        self._pool.submit(partial(self._answer, planner, tuple(keys), num_tokens, num_known))

    def shun(self, object_id: ObjectId) -> None:
        """It was here and could not be loaded."""
        with self._lock:
            self._shunned.add(object_id)

    def take(self, count: int) -> list[PlannedObject]:
        """At most ``count`` found objects, each after its parents."""
        with self._lock:
            found = [self._found.popleft() for _ in range(min(count, len(self._found)))]
            return [item for item in found if item.object_id not in self._shunned]

    def stop(self) -> None:
        """Nothing is found any more, nor what was found and not taken."""
        with self._lock:
            self._is_stopped = True
            self._found.clear()

    def close(self) -> None:
        self.stop()
        self._pool.stop(_JOIN_S)

    # In its own thread.

    def _answer(self, planner: HybridOffloadPlanner, keys: tuple[bytes, ...], num_tokens: int, num_known: int) -> None:
        try:
            found = [] if self._is_stopped else self._probe(planner, keys, num_tokens, num_known)
        finally:
            with self._lock:
                self._num_pending -= 1
        with self._lock:
            if not self._is_stopped:
                self._found.extend(found)

    def _probe(
        self, planner: HybridOffloadPlanner, keys: tuple[bytes, ...], num_tokens: int, num_known: int
    ) -> list[PlannedObject]:
        """What is there of the prompt: all its leading chunks, and what its best restore point takes."""
        ends = {key: (place + 1) * planner.geometry.match_unit for place, key in enumerate(keys)}
        view = _FilesView(self._read, ends)
        found: list[PlannedObject] = []
        for _ in range(_MAX_SEARCHES):
            wanted = self._wanted(planner, keys, num_tokens, num_known, view)
            found = [planned for item in wanted if (planned := view.get(item.object_id)) is not None]
            missing = next((item for item in wanted if view.get(item.object_id) is None), None)
            if missing is None:
                break
            view.mark_gap(missing)
        return found

    def _wanted(
        self,
        planner: HybridOffloadPlanner,
        keys: tuple[bytes, ...],
        num_tokens: int,
        num_known: int,
        view: _FilesView,
    ) -> list[PlannedObject]:
        """Parents first: full attention by position, then windows, then the snapshot."""
        geometry = planner.geometry
        coverage = CoverageSearch(geometry, keys, num_tokens, num_known, view).run()
        wanted = {item.object_id: item for item in planner.load_plan(keys, 0, coverage.restore_point)}
        for group in geometry.full:
            for index in range(coverage.tokens[group.group_id] // geometry.chunk_size_of(group)):
                chunk = planner.chunk(keys, group, index)
                wanted.setdefault(chunk.object_id, chunk)
        return sorted(wanted.values(), key=_order)

    def _read(self, object_id: ObjectId) -> PlannedObject | None:
        """The object, if every rank's header verifies and it has not just failed to load."""
        with self._lock:
            if self._is_stopped or object_id in self._shunned:
                return None
        try:
            return read_planned(self._device, self._root, self._namespace, self._world_size, object_id, self._integrity)
        except (BadObject, ValueError):
            return None


def _order(item: PlannedObject) -> tuple[int, int]:
    return _ORDER[item.object_id.kind], item.end_tokens
