# SPDX-License-Identifier: Apache-2.0
"""Replays a trace through two tiers of one MultiConnector: what each request restores, alone and composed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.replay_tiers import Admission, Shelf
from bench.trace import BLOCK_TOKENS, TraceRequest
from vllm_overlay.planner.batched_hits import BatchedHits
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import ObjectId, ObjectKind, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner

BLOCK_SIZE = 2 * BLOCK_TOKENS
"""Of vLLM, in tokens: the multiple of a trace's block next to Qwen3.5-35B-A3B's 1056. Without a device cache it does
not show."""
PREFILL_TOKENS_PER_S = 20_000
DECODE_TOKENS_PER_S = 50
STEP_S = 0.1
"""How often a request's stores are tried again while a write limit holds them back."""


def _geometry(*groups: Group) -> Geometry:
    return Geometry.build(groups, BLOCK_TOKENS, BLOCK_TOKENS)


def _attention(group_id: int, kind: GroupKind, token_bytes: int, window: int = 0) -> Group:
    return Group(group_id, kind, BLOCK_SIZE, token_bytes, BLOCK_SIZE * token_bytes, sliceable=True, window=window)


MODELS = {
    "states": _geometry(
        _attention(0, GroupKind.FULL, 20_480),
        Group(1, GroupKind.RECURRENT, BLOCK_SIZE, 0, 63_000_000, sliceable=False),
    ),
    "windows": _geometry(_attention(0, GroupKind.FULL, 20_480), _attention(1, GroupKind.WINDOW, 118_784, window=1024)),
}
"""Qwen3.5-35B-A3B's bytes, and Gemma-3-4B's, in chunks of a trace's blocks."""


@dataclass(slots=True)
class ReplayTier:
    """One child of the MultiConnector: what it holds, what it admits."""

    shelf: Shelf
    admission: Admission
    takes_stores: bool = True
    """False: it gets only what its sibling evicts."""
    runs: "list[StoreRun]" = field(default_factory=list)
    """Of requests that live and have stores left."""


@dataclass(slots=True)
class StoreRun:
    """The stores of one request into one tier. ``snapshots`` come with the second at which they are computed."""

    chunks: Sequence[PlannedObject]
    snapshots: list[tuple[float, PlannedObject]]
    first_computed_s: float
    ends_s: float
    num_restored: int
    cursor: int = 0
    asked: int = 0

    def advance(self, tier: ReplayTier, now: float) -> None:
        """One step, as the connector's: complete chunks in their order, then the states that this step offers."""
        while self.cursor < len(self.chunks) and self._computed_s(self.chunks[self.cursor]) <= now:
            chunk = self.chunks[self.cursor]
            if not self._pass(chunk, tier) and chunk.object_id.kind is ObjectKind.FULL_ATTENTION:
                break  # without it no later chunk could be found; a window's is not waited for
            self.cursor += 1
        while self.snapshots and self.snapshots[0][0] <= now:
            _, snapshot = self.snapshots.pop(0)
            if tier.admission.wants(snapshot.object_id):
                _write(snapshot, tier)

    def is_over(self, now: float) -> bool:
        return now >= self.ends_s or (self.cursor == len(self.chunks) and not self.snapshots)

    def _computed_s(self, chunk: PlannedObject) -> float:
        return self.first_computed_s + max(0, chunk.end_tokens - self.num_restored) / PREFILL_TOKENS_PER_S

    def _pass(self, chunk: PlannedObject, tier: ReplayTier) -> bool:
        """Whether the chunk is there, or is not wanted."""
        if self.asked == self.cursor:
            self.asked += 1
            if not tier.admission.wants(chunk.object_id):
                return True
        return _write(chunk, tier)


def _write(planned: PlannedObject, tier: ReplayTier) -> bool:
    if tier.shelf.has(planned.object_id):
        return tier.shelf.put(planned)
    if not tier.admission.allows(planned.num_bytes) or not tier.shelf.put(planned):
        return False
    tier.admission.spend(planned.num_bytes)
    return True


@dataclass(frozen=True, slots=True)
class Load:
    """What a load restores, and what it takes from the CPU and from the disk."""

    tokens: int = 0
    cpu_bytes: int = 0
    disk_bytes: int = 0

    def seconds(self, cpu_bytes_per_s: float, disk_bytes_per_s: float) -> float:
        """Both sides at once."""
        return max(self.cpu_bytes / cpu_bytes_per_s, self.disk_bytes / disk_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Served:
    """One request: what was loaded, and what could have been at the same moment."""

    num_tokens: int
    load: Load
    alone: tuple[Load, ...]
    """From each child that has something."""
    composed: tuple[Load, ...]
    """To each of these restore points and to the composed one, each object from the first child that has it."""


def best_child(tokens: Sequence[int]) -> int:
    """As ``multi_connector.selection.decide`` with equal weights, which needs vLLM to be imported."""
    return max(range(len(tokens)), key=tokens.__getitem__)


def best_junction(junctions: Sequence[int], restored: int, num_tokens: int) -> int:
    """As ``multi_connector.selection.merge_junctions``; 0 when there is none."""
    return max((junction for junction in junctions if restored < junction < num_tokens), default=0)


class _Union:
    """The children's objects as one store, for the planner's ``BatchedHits``."""

    def __init__(self, tiers: Sequence[ReplayTier]) -> None:
        self._tiers = tiers

    def has_each(self, object_ids: Sequence[ObjectId]) -> Sequence[bool]:
        return [any(tier.shelf.has(object_id) for tier in self._tiers) for object_id in object_ids]


class RememberingPlanner(HybridOffloadPlanner):
    """Makes each chunk once: a trace names the same ones again and again."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self._made: dict[tuple[int, bytes], PlannedObject] = {}

    def chunk(self, keys: Sequence[bytes], group: Group, index: int) -> PlannedObject:
        name = group.group_id, keys[index]
        if (made := self._made.get(name)) is None:
            made = self._made[name] = super().chunk(keys, group, index)
        return made


class Replay:
    """Serves requests one after the other, without a device cache. ``tiers``: the CPU, then the disk.

    With ``composes`` a load takes its objects from both tiers, else from the child with the most tokens. What a load
    takes counts as used in the child that it is taken from. Every child stores all that passes. With
    ``offers_restored`` vLLM offers the restored state too, so that the sibling can store it. In truth vLLM does so only
    if the prompt ends there.
    """

    def __init__(
        self, geometry: Geometry, tiers: Sequence[ReplayTier], composes: bool, offers_restored: bool = False
    ) -> None:
        self.tiers = tiers
        self._composes = composes
        self._offers_restored = offers_restored
        self._geometry = geometry
        self._planner = RememberingPlanner(geometry)
        self.now = 0.0

    def clock(self) -> float:
        """Seconds of the trace."""
        return self.now

    def run(self, requests: Sequence[TraceRequest], before: Callable[[int], None]) -> Iterator[Served]:
        """``before`` is called with the place of each request before it is served."""
        for place, request in enumerate(requests):
            before(place)
            yield self.serve(request)

    def serve(self, request: TraceRequest) -> Served:
        self._advance_to(request.arrival_s)
        for tier in self.tiers:
            tier.shelf.tick()
        keys = [block_id.to_bytes(8, "little") for block_id in request.block_ids]
        prompt = self._geometry, keys, request.num_tokens
        views = [tier.shelf.hits(*prompt) for tier in self.tiers] + [BatchedHits(*prompt, _Union(self.tiers))]
        *lookups, joint = (self._planner.lookup(keys, request.num_tokens, 0, view) for view in views)
        points = [lookup.restore_point for lookup in lookups]
        alone = [self._load(keys, point, [tier]) for tier, point in zip(self.tiers, points, strict=True) if point]
        composed = [self._load(keys, point, self.tiers) for point in sorted({*points, joint.restore_point} - {0})]
        if self._composes:
            restored, sources = joint.restore_point, list(self.tiers)
        else:
            chosen = best_child(points)
            restored, sources = points[chosen], [self.tiers[chosen]]
        load = self._load(keys, restored, sources, uses=True)
        junctions = [lookup.junction for lookup in (*lookups, *([joint] if self._composes else []))]
        junction = best_junction(junctions, restored, request.num_tokens)
        self._store(request, keys, restored, junction)
        return Served(request.num_tokens, load, tuple(alone), tuple(composed))

    def _load(self, keys: Sequence[bytes], point: int, sources: Sequence[ReplayTier], uses: bool = False) -> Load:
        planned = self._planner.load_plan(keys, 0, point)
        taken: list[list[PlannedObject]] = [[] for _ in self.tiers]
        for item in planned:
            source = next(tier for tier in sources if tier.shelf.has(item.object_id))
            taken[self.tiers.index(source)].append(item)
        if uses:
            for tier, items in zip(self.tiers, taken, strict=True):
                tier.shelf.use([item.object_id for item in items])
        cpu, disk = (sum(item.num_bytes for item in items) for items in taken)
        return Load(point, cpu, disk)

    def _store(self, request: TraceRequest, keys: Sequence[bytes], restored: int, junction: int) -> None:
        last = self._geometry.floor_to_restore_point(request.num_tokens - 1)
        boundaries = sorted({boundary for boundary in (junction, last) if boundary > restored})
        if not self._geometry.recurrent:
            boundaries = []
        elif restored and (restored == last or self._offers_restored):
            boundaries.insert(0, restored)
        chunks = self._planner.store_plan(keys, {}, request.num_tokens)
        computed_s = (request.num_tokens - restored) / PREFILL_TOKENS_PER_S
        ends_s = self.now + computed_s + request.num_output_tokens / DECODE_TOKENS_PER_S
        for tier in self.tiers:
            if not tier.takes_stores:
                continue
            kept = tier.admission.num_kept(len(chunks))
            states = [
                (self.now + (boundary - restored) / PREFILL_TOKENS_PER_S, self._planner.snapshot(keys, boundary))
                for boundary in boundaries
            ]
            run = StoreRun(chunks[:kept], states, self.now, ends_s, restored)
            if tier.admission.is_limited:
                tier.runs.append(run)
            else:
                run.advance(tier, float("inf"))

    def _advance_to(self, arrival_s: float) -> None:
        """Steps until the next request comes."""
        while self.now < arrival_s:
            self.now = min(arrival_s, self.now + STEP_S)
            if not any(tier.runs for tier in self.tiers):
                self.now = arrival_s
            for tier in self.tiers:
                for run in tier.runs:
                    run.advance(tier, self.now)
                tier.runs = [run for run in tier.runs if not run.is_over(self.now)]
