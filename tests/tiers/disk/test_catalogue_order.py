# SPDX-License-Identifier: Apache-2.0
"""The order in which docs/eviction.md replays a disk tier is the catalogue's own."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.catalogue_order import CatalogueOrder
from bench.hit_replay import Clock, HitReplay
from bench.replay_tiers import IndexShelf
from bench.trace import TraceRequest
from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import MODEL, Engine
from tests.tiers.entries import evict_one
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.tiers.disk.bookkeeper import LATE_S
from vllm_overlay.tiers.disk.catalogue import File, Limits, Scored, StoredObject
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.entry import Entry

FULL = Group(0, GroupKind.FULL, 64, 10, 640, sliceable=True)
STATES = Geometry.build([FULL, Group(1, GroupKind.RECURRENT, 64, 0, 4_000, sliceable=False)], 64, 64)
DENSE = Geometry.build([FULL], 64, 64)
WINDOWS = Geometry.build([FULL, Group(1, GroupKind.WINDOW, 64, 20, 1280, sliceable=True, window=128)], 64, 64)


NAMESPACE = DiskNamespace(MODEL.fingerprint, "5" * 64, {})


class Mirrored(CatalogueOrder):
    """Tells a catalogue the same."""

    def __init__(self, clock: Clock, engine: Engine) -> None:
        super().__init__(clock, 100_000, ranks=True)
        self.engine, self.clock = engine, clock

    def stored(self, items: Sequence[Entry]) -> None:
        super().stored(items)
        for item in items:
            parents = tuple(parent.object_id for parent in item.parents)
            planned = NAMESPACE.stored(PlannedObject(item.object_id, parents, 0, item.end_tokens, item.num_bytes))
            file = File(self.engine.name, item.ticket)
            self.engine.store(StoredObject(MODEL.fingerprint, planned, file, 1, item.num_bytes, int(self.clock())))

    def used(self, items: Sequence[Entry]) -> None:
        super().used(items)
        names = [NAMESPACE.stored_id(item.object_id) for item in items]
        self.engine.catalogue.touch(MODEL.fingerprint, names, int(self.clock()))

    def publish(self, times: Iterable[Scored]) -> None:
        known = list(times)
        super().publish(known)
        scores = [Scored(NAMESPACE.stored_id(item.object_id), item.score, item.until + LATE_S) for item in known]
        self.engine.catalogue.publish_scores(MODEL.fingerprint, scores, 1 << 39)


@pytest.mark.parametrize("geometry", [STATES, DENSE, WINDOWS], ids=["states", "dense", "windows"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_catalogue_evicts_in_the_order_of_the_replay(geometry: Geometry, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        engine, clock = Engine(Path(root)), Clock(1000.0)
        policy = Mirrored(clock, engine)
        policy.serve(geometry)
        shelf = IndexShelf(None, policy)
        replay = HitReplay(geometry, shelf, clock, 128)
        prompts: list[tuple[int, ...]] = [()]
        for place in range(data.draw(st.integers(1, 12))):
            base = data.draw(st.sampled_from(prompts))
            prompts.append((*base, *range(100 * place + 1, 100 * place + data.draw(st.integers(2, 5)))))
            at = clock.now + data.draw(st.sampled_from([0.25, 3.0, 90.0]))
            replay.serve(TraceRequest(at, 64 * len(prompts[-1]) + 1, 1, prompts[-1]))
            policy.rank_if_due()
        known = {item.file: NAMESPACE.own_id(item.object_id) for item in engine.loaded()}
        order = [known[item.file] for item in engine.catalogue.choose_victims(Limits(1 << 50, 1 << 20), 0)]
        evicted = []
        while (entry := evict_one(shelf.index)) is not None:
            evicted.append(entry.object_id)
        assert evicted == order
        assert check(engine.catalogue) == []
        engine.close()
