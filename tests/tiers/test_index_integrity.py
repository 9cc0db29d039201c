# SPDX-License-Identifier: Apache-2.0
"""Each thing in an index that contradicts another is seen and named."""

from collections.abc import Callable

import pytest

from tests.tiers.entries import entries_of
from tests.tiers.integrity import check_integrity
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.entry import Entry, EntryState
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

CHUNKS = [ObjectId("f0", bytes([place])) for place in range(5)]
SNAPSHOT = ObjectId("s", CHUNKS[1].key)


class Sample:
    """Three visible chunks with a snapshot on the second, a fourth on its way, and a fifth stored on top of that."""

    def __init__(self) -> None:
        self.policy = LeastRecentlyUsed[Entry]()
        self.index = PrefixIndex(None, self.policy)
        chunks = [
            PlannedObject(object_id, tuple(CHUNKS[max(0, place - 1) : place]), 64 * place, 64 * place + 64, 10, 0)
            for place, object_id in enumerate(CHUNKS)
        ]
        self.index.restore([*chunks[:3], PlannedObject(SNAPSHOT, (CHUNKS[1],), 128, 128, 10)])
        self.index.reserve(chunks[3], 7)
        self.index.restore(chunks[4:])
        check_integrity(self.index)

    def __getitem__(self, object_id: ObjectId) -> Entry:
        return entries_of(self.index)[object_id]

    def set(self, object_id: ObjectId, /, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self[object_id], name, value)

    def offer(self, object_id: ObjectId) -> None:
        self.policy.add(self[object_id], 0, 0)


DROPPED = EntryState.DROPPED
PLANTS: list[tuple[Callable[[Sample], object], str]] = [
    (lambda made: made.set(CHUNKS[2], num_bytes=11), "used_bytes is 60, but the entries have 61 bytes"),
    (lambda made: made.set(CHUNKS[0], object_id=SNAPSHOT), "is in the index as"),
    (lambda made: made.set(CHUNKS[3], ticket=8), "of ticket 8 is in flight as ticket 7"),
    (lambda made: made.set(CHUNKS[3], object_id=ObjectId("f0", b"?")), "is in flight, but not in the index"),
    (lambda made: made.set(CHUNKS[3], state=EntryState.STORED), "is in flight still"),
    (lambda made: made.set(CHUNKS[2], state=EntryState.RESERVED), "waits for ticket 0, which is not in flight"),
    (lambda made: made.set(CHUNKS[0], pins=-1), "has -1 pins"),
    (lambda made: made.set(CHUNKS[3], pins=1), "is pinned, but was never visible"),
    (lambda made: made.set(CHUNKS[0], parents=(Sample()[CHUNKS[1]],)), "hangs on .*, which is not in the index"),
    (lambda made: made[CHUNKS[1]].children.pop(made[CHUNKS[2]]), "does not have it among its children"),
    (
        lambda made: made[CHUNKS[1]].children.update({Sample()[CHUNKS[2]]: None}),
        "a child .*, which is not in the index",
    ),
    (lambda made: made.set(CHUNKS[2], parents=()), "a child .*, which does not hang on it"),
    (lambda made: made.set(CHUNKS[3], state=DROPPED), "still has parents or children"),
    (lambda made: made.set(CHUNKS[0], state=DROPPED, children=set()), "held by neither a ticket nor a pin"),
    (lambda made: made.set(CHUNKS[0], state=EntryState.STORED), "is not visible, but all its parents are"),
    (lambda made: made.set(CHUNKS[4], state=EntryState.COMMITTED), "is visible, but a parent is not"),
    (lambda made: made.set(CHUNKS[1], num_snapshots=2), "counts 2 snapshots, but 1 are visible"),
    (lambda made: made.set(CHUNKS[2], jump=None), "jumps past .*, which has snapshots"),
    (lambda made: made.set(CHUNKS[2], jump=made[CHUNKS[0]]), "jumps past .*, which has snapshots"),
    (lambda made: made.set(CHUNKS[1], jump=made[CHUNKS[2]]), "jumps to .*, which is not above it"),
    (lambda made: made.policy.discard(made[SNAPSHOT]), "may be evicted, but the policy has it otherwise"),
    (lambda made: made.offer(CHUNKS[0]), "must not be evicted, but the policy has it otherwise"),
    (lambda made: made.policy.add(Sample()[SNAPSHOT], 0, 0), "the policy has 2 entries, but 1 may be evicted"),
]


@pytest.mark.parametrize(("plant", "sentence"), PLANTS, ids=[sentence for _, sentence in PLANTS])
def test_an_index_that_contradicts_itself_is_seen(plant: Callable[[Sample], object], sentence: str) -> None:
    made = Sample()
    plant(made)
    with pytest.raises(AssertionError, match=sentence):
        check_integrity(made.index)


def test_a_jump_may_lead_to_a_chunk_that_has_no_snapshots_any_more() -> None:
    made = Sample()
    made.index.drop(SNAPSHOT)
    assert made[CHUNKS[2]].jump is made[CHUNKS[1]]
    check_integrity(made.index)
