# SPDX-License-Identifier: Apache-2.0
"""The order in which docs/eviction.md replays a disk tier is the catalogue's own."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.baselines import Moment
from bench.catalogue_order import CatalogueOrder
from bench.future import Future
from bench.hit_replay import Clock, HitReplay
from bench.replay_tiers import IndexShelf
from bench.trace import TraceRequest
from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import CHUNKS, SNAPSHOTS, member, store
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.tiers.disk.bookkeeper import LATE_S
from vllm_overlay.tiers.disk.catalogue import Catalogue, Limits, Name, Scored, StoredObject
from vllm_overlay.tiers.disk.ranking import Timed
from vllm_overlay.tiers.entry import Entry

FULL = Group(0, GroupKind.FULL, 64, 10, 640, sliceable=True)
STATES = Geometry.build([FULL, Group(1, GroupKind.RECURRENT, 64, 0, 4_000, sliceable=False)], 64, 64)
DENSE = Geometry.build([FULL], 64, 64)
WINDOWS = Geometry.build([FULL, Group(1, GroupKind.WINDOW, 64, 20, 1280, sliceable=True, window=128)], 64, 64)


def name_of(item: Entry) -> Name:
    return Name((SNAPSHOTS if item.object_id.is_snapshot else CHUNKS).fingerprint, item.object_id)


class Mirrored(CatalogueOrder):
    """Tells a catalogue the same."""

    def __init__(self, moment: Moment, catalogue: Catalogue) -> None:
        super().__init__(moment, ranks=True)
        self.catalogue, self.clock = catalogue, moment.clock
        self.names: dict[object, Name] = {}

    def stored(self, item: Entry) -> None:
        super().stored(item)
        name = self.names[item.object_id] = name_of(item)
        parents = tuple(parent.object_id for parent in item.parents)
        planned = PlannedObject(item.object_id, parents, 0, item.end_tokens, item.num_bytes)
        stored = StoredObject(name.fingerprint, planned, 1, item.num_bytes, item.ticket, int(self.clock()))
        store(self.catalogue, stored)

    def used(self, items: Sequence[Entry]) -> None:
        super().used(items)
        self.catalogue.touch(map(name_of, items), int(self.clock()))

    def publish(self, times: Iterable[Timed]) -> None:
        known = list(times)
        super().publish(known)
        scores = [Scored(self.names[item.object_id], item.evict_as, item.until + LATE_S) for item in known]
        self.catalogue.publish_scores(scores, 1 << 39)


@pytest.mark.parametrize("geometry", [STATES, DENSE, WINDOWS], ids=["states", "dense", "windows"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_catalogue_evicts_in_the_order_of_the_replay(geometry: Geometry, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        catalogue, clock = member(Path(root)), Clock(1000.0)
        policy = Mirrored(Moment(clock, 100_000, Future([], 64)), catalogue)
        policy.serve(geometry)
        shelf = IndexShelf(None, policy)
        replay = HitReplay(geometry, shelf, clock, 128)
        prompts: list[tuple[int, ...]] = [()]
        for place in range(data.draw(st.integers(1, 12))):
            base = data.draw(st.sampled_from(prompts))
            prompts.append((*base, *range(100 * place + 1, 100 * place + data.draw(st.integers(2, 5)))))
            at = clock.now + data.draw(st.sampled_from([0.25, 3.0, 90.0]))
            replay.serve(place, TraceRequest(at, 64 * len(prompts[-1]) + 1, 1, prompts[-1]))
            policy.rank_if_due()
        order = [item.name.object_id for item in catalogue.choose_victims(Limits(1 << 50, 1 << 20), 0)]
        evicted = []
        while (entry := shelf.index.evict_one()) is not None:
            evicted.append(entry.object_id)
        assert evicted == order
        assert check(catalogue) == []
        catalogue.close()
