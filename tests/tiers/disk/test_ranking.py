# SPDX-License-Identifier: Apache-2.0
"""Rankings of a learned policy: as times, in a catalogue that several engines share, and over a restart."""

import math
import time
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.files import on_disk
from tests.tiers.disk.inside import catalogue_of
from tests.tiers.disk.objects import GEOMETRY, OBJECT, chain, key
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, TierPair, store_many, tier_pair
from tests.tiers.integrity import check_integrity
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk import ranking
from vllm_overlay.tiers.disk.catalogue import File, Limits, Scored
from vllm_overlay.tiers.disk.ranking import Ranker, times_of
from vllm_overlay.tiers.policies.base import Ranked

EVERYTHING = Limits(1 << 50, 256, frozenset())


@pytest.fixture
def ranks_often(monkeypatch):
    """A ranking is due at once."""
    monkeypatch.setattr(ranking, "LEAST_S", 0.0)
    monkeypatch.setattr(ranking, "MOST_S", 0.0)


def going_on(name: str, first: list[PlannedObject]) -> list[PlannedObject]:
    """Another turn on top of a prompt of one chunk: its chunk, and its snapshot."""
    chunk = PlannedObject(ObjectId("f0", key(name)), (first[0].object_id,), 64, 128, OBJECT, 0)
    return [chunk, PlannedObject(ObjectId("s", key(name, "state")), (chunk.object_id,), 128, 128, OBJECT)]


def talk(made: TierPair) -> tuple[list[PlannedObject], list[PlannedObject], list[PlannedObject]]:
    """A prompt that stays alone, then one that is used and gets a second turn; returns the second turn last."""
    alone, first = chain("alone", 1), chain("first", 1)
    made.store(alone)
    made.store(first)
    second = going_on("second", first)
    tickets = made.tier.acquire(first)
    assert tickets is not None
    made.tier.release(tickets)
    made.store(second)
    made.settled()
    return alone, first, second


def victims(made: TierPair, now: int = 0) -> list[File]:
    """All objects' files in the order in which they would go. At 0 no score has expired."""
    return [item.file for item in catalogue_of(made.tier).choose_victims(EVERYTHING, now)]


rankings = st.lists(st.tuples(st.floats(0, 9), st.none() | st.floats(1, 99), st.floats(0, 99)), max_size=200)


@given(rankings, st.floats(0, 1e9))
def test_the_times_are_the_last_uses_given_out_by_value_in_the_second_before(found, to_epoch_s):
    named = [Ranked(ObjectId("s", bytes([place])), *item) for place, item in enumerate(found)]
    by_name = {item.object_id: item for item in named}
    timed = list(times_of(named, to_epoch_s))
    assert sorted(item.object_id.key for item in timed) == sorted(name.key for name in by_name)
    assert all(item.until == by_name[item.object_id].until + to_epoch_s for item in timed)
    assert all(item.score == 0 for item in timed if by_name[item.object_id].used_at is None)
    usable = [item for item in timed if by_name[item.object_id].used_at is not None]
    seconds = sorted(math.floor(item.used_at + to_epoch_s) for item in named if item.used_at is not None)
    assert [math.floor(item.score) for item in usable] == [second - 1 for second in seconds]
    assert all(one.score < other.score for one, other in pairwise(usable))
    values = [by_name[item.object_id].value for item in usable]
    assert values == sorted(values)


def test_objects_that_go_together_have_one_time():
    one, other = ObjectId("f0", b"a"), ObjectId("w1", b"a")
    timed = list(times_of([Ranked(one, 1.0, 7.0, 8.0, (other,))], 0.0))
    assert timed == [Scored(one, 6.5, 8.0), Scored(other, 6.5, 8.0)]


class Stopped:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_ranking_is_due_after_a_part_of_the_capacity_or_a_minute_and_not_at_once():
    clock = Stopped()
    ranker = Ranker(GEOMETRY, 16 * OBJECT, clock=clock)

    def is_due() -> bool:
        return ranker.advance(math.inf) is not None

    ranker.stored(OBJECT)
    assert not is_due()
    clock.now = ranking.LEAST_S
    assert is_due()
    clock.now += ranking.LEAST_S
    ranker.stored(OBJECT - 1)
    assert not is_due()
    clock.now += ranking.MOST_S
    assert is_due()
    assert not is_due()


def test_what_a_turn_has_superseded_goes_before_what_is_older_but_not_by_last_use(tmp_path: Path, ranks_often):
    for policy, goes_first in (("learned", 1), ("lru", 0)):
        with tier_pair(tmp_path / policy, eviction_policy=policy) as made:
            prompts = talk(made)
            wanted = made.file(prompts[goes_first][-1])
            until(lambda made=made, wanted=wanted: made.tier.advance() or victims(made)[0] == wanted, policy)


def test_what_is_newer_than_a_ranking_goes_after_what_was_used_in_the_same_second(tmp_path: Path, ranks_often):
    """So a prompt that is being stored keeps the chunks that the next ones need."""
    with tier_pair(tmp_path / "root", capacity_bytes=15 * on_disk(), eviction_policy="learned") as made:
        store_many(made, 100, lambda: None)


def test_a_unit_goes_as_a_whole_and_all_of_it_before_what_is_worth_more(tmp_path: Path, ranks_often):
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        alone, first, second = talk(made)
        until(lambda: made.tier.advance() or victims(made)[0] == made.file(first[-1]), "scores")
        order = victims(made)
        assert order.index(made.file(second[0])) == order.index(made.file(second[1])) + 1
        assert order.index(made.file(alone[0])) == order.index(made.file(alone[1])) + 1


def test_scores_expire_and_leave_the_order_of_last_use(tmp_path: Path, ranks_often):
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        alone, first, _ = talk(made)
        until(lambda: made.tier.advance() or victims(made)[0] == made.file(first[-1]), "scores")
        made.settled()
        assert victims(made, now=1 << 39)[0] == made.file(alone[-1])


def test_after_a_restart_what_was_not_used_since_is_ranked_by_nobody(tmp_path: Path, ranks_often):
    with tier_pair(tmp_path / "root") as made:
        alone, first, second = talk(made)
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        made.recovered()
        long_ago = int(time.time()) - 10  # a score lies in the second before, so the lives must be further apart
        stored = [NAMESPACE.stored_id(planned.object_id) for planned in (*alone, *first, *second)]
        catalogue_of(made.tier).touch(NAMESPACE.fingerprint, stored, long_ago)
        made.store(chain("new", 1))
        made.settled()
        made.settled()
        assert victims(made)[0] == made.file(alone[-1])
        tickets = made.tier.acquire([*first[:1], *second])
        assert tickets is not None
        made.tier.release(tickets)
        made.settled()
        assert set(victims(made)) == {made.file(each) for each in (*alone, *first, *second, *chain("new", 1))}


def test_another_engine_of_the_namespace_outranks_what_it_used_later(tmp_path: Path, ranks_often, monkeypatch):
    monkeypatch.setattr("vllm_overlay.tiers.disk.bookkeeper.LATE_S", -100.0)  # as if all was used later elsewhere
    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        alone, _, _ = talk(made)
        made.settled()
        made.settled()
        assert victims(made)[0] == made.file(alone[-1])


def test_a_policy_that_fails_ranks_no_more_and_loses_nothing(tmp_path: Path, ranks_often, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    with tier_pair(tmp_path / "root", eviction_policy="learned") as made:
        monkeypatch.setattr("vllm_overlay.tiers.policies.learned.LearnedEviction.ranking", fail)
        alone, first, second = talk(made)
        assert made.reasons([*alone, *first, *second]) == [""] * 6
        assert victims(made)[0] == made.file(alone[-1])
    assert caplog.text.count("eviction policy LearnedEviction failed") == 1


@pytest.mark.parametrize("namespace", [NAMESPACE, OTHER_NAMESPACE], ids=["the same model", "another model"])
def test_an_engine_without_the_policy_evicts_by_the_scores_of_one_with_it(tmp_path: Path, ranks_often, namespace):
    room = 40 * on_disk()
    with (
        tier_pair(tmp_path / "root", eviction_policy="learned", capacity_bytes=room) as one,
        tier_pair(tmp_path / "root", namespace=namespace, capacity_bytes=room) as two,
    ):
        _, first, _ = talk(one)
        until(lambda: one.tier.advance() or victims(two)[0] == one.file(first[-1]), "scores")
        turns = count()
        while one.has(first[-1]):
            two.store(chain(f"many-{next(turns)}", 1))
            one.tier.advance()
        check_integrity(one.tier.index)
        assert check(catalogue_of(two.tier)) == []
