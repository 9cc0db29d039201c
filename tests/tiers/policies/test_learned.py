# SPDX-License-Identifier: Apache-2.0
"""What a full tier with the learned policy gives up: the same as a slow and obvious twin, and what one would expect."""

from collections.abc import Callable, Sequence
from itertools import count, islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hit_replay import Clock, HitReplay
from bench.replay_tiers import IndexShelf
from bench.trace import TraceRequest
from tests.tiers.integrity import check_integrity
from tests.tiers.policies.naive_learned import NaiveLearned
from tests.tiers.policies.structure import check_runs
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies import ghosts
from vllm_overlay.tiers.policies.base import EvictionPolicy, Ranked
from vllm_overlay.tiers.policies.learned import UNFINISHED_S, LearnedEviction
from vllm_overlay.tiers.policies.reuse import Learned

FULL = Group(0, GroupKind.FULL, 64, 10, 640, sliceable=True)
STATES = Geometry.build([FULL, Group(1, GroupKind.RECURRENT, 64, 0, 4_000, sliceable=False)], 64, 64)
DENSE = Geometry.build([FULL], 64, 64)
WINDOWS = Geometry.build([FULL, Group(1, GroupKind.WINDOW, 64, 20, 1280, sliceable=True, window=128)], 64, 64)
CHUNK, SNAPSHOT, WINDOW = 640, 4_000, 1280


class Tier:
    """One index with a policy, driven by requests as the connector drives it."""

    def __init__(
        self, geometry: Geometry, capacity: int | None, policy_of: Callable[[Clock], EvictionPolicy], speculative=0
    ) -> None:
        self.clock = Clock()
        self.policy = policy_of(self.clock)
        self.policy.serve(geometry)
        self.shelf = IndexShelf(capacity, self.policy)
        self.evicted = self.shelf.evicted
        self._replay = HitReplay(geometry, self.shelf, self.clock, 128, speculative)

    def serve(self, at: float, *blocks: int) -> int:
        """Tokens restored of a prompt of these blocks of 64 tokens and one token more."""
        request = TraceRequest(at, 64 * len(blocks) + 1, 1, tuple(blocks))
        served = self._replay.serve(request)
        return served.num_restored

    def has(self, *blocks: int, tag: str = "s") -> list[bool]:
        return [self.shelf.has(ObjectId(tag, block.to_bytes(8, "little"))) for block in blocks]


def learned(clock: Clock) -> LearnedEviction:
    return LearnedEviction(clock)


@st.composite
def conversations(draw) -> list[tuple[float, tuple[int, ...]]]:
    """Prompts that extend, share, repeat and leave each other, at times that differ."""
    prompts: list[tuple[int, ...]] = [()]
    requests = []
    now, next_block = 0.0, 1
    for place in range(draw(st.integers(3, 40))):
        now += draw(st.sampled_from([0.25, 3.0, 40.0, 700.0])) + place / 1024
        base = draw(st.sampled_from(prompts[-6:]))
        base = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        new = draw(st.integers(0 if base else 1, 5))
        prompt = base + tuple(range(next_block, next_block + new))
        next_block += new
        prompts.append(prompt)
        requests.append((now, prompt))
    return requests


@settings(max_examples=200, deadline=None)
@given(conversations(), st.integers(0, 40_000), st.sampled_from([0, 128, 256]))
def test_the_same_goes_as_with_a_twin_that_looks_at_everything(requests, spare, speculative) -> None:
    """In a tier that has room for any one of the prompts, with all of its states."""
    largest = max(len(prompt) for _, prompt in requests)
    capacity = largest * (CHUNK + (SNAPSHOT if speculative else 0)) + 3 * SNAPSHOT + spare
    twins = [Tier(STATES, capacity, make, speculative) for make in (learned, NaiveLearned)]
    for at, prompt in requests:
        restored = [tier.serve(at, *prompt) for tier in twins]
        assert twins[0].evicted == twins[1].evicted
        assert restored[0] == restored[1]
    check_runs(twins[0].shelf.index, twins[0].policy)


def test_what_is_longest_unused_goes_first_of_equals_and_as_a_unit() -> None:
    tier = Tier(STATES, 2 * (3 * CHUNK + SNAPSHOT), learned)
    tier.serve(0, 1, 2, 3)
    tier.serve(10, 4, 5, 6)
    tier.serve(20, 7, 8, 9)
    assert tier.has(3, 6, 9) == [False, True, True]
    assert [object_id.tag for object_id in tier.evicted] == ["s", "f0", "f0", "f0"]


def test_the_state_of_a_turn_that_has_a_next_one_goes_before_the_next_ones() -> None:
    tier = Tier(STATES, 12 * CHUNK + 3 * SNAPSHOT, learned)
    tier.serve(0, 1, 2)
    tier.serve(30, 1, 2, 3, 4)
    tier.serve(60, 5, 6)
    tier.serve(90, 7, 8)
    assert tier.has(2, 4, 6, 8) == [False, True, True, True]


def test_a_speculative_state_is_the_first_to_go() -> None:
    tier = Tier(STATES, 12 * CHUNK + 3 * SNAPSHOT, learned, speculative=128)
    tier.serve(0, 1, 2, 3)
    tier.serve(1, 4, 5)
    assert tier.has(2, 3, 5) == [True, True, True]
    tier.serve(2, 6, 7)
    assert tier.has(2, 3, 5, 7) == [False, True, True, True]


def test_where_prompts_part_a_state_stays_when_those_of_its_prompts_go() -> None:
    tier = Tier(STATES, 3 * (4 * CHUNK + SNAPSHOT), learned)
    for place in range(40):
        tier.serve(5.0 * place, 1, 2, 100 + place, 200 + place)
    assert tier.has(2) == [True]
    assert tier.serve(205.0, 1, 2, 300) == 128


def test_chunks_that_no_state_can_use_go_with_their_state() -> None:
    """Also those above a fork, once both of its prompts are gone."""
    tier = Tier(STATES, 8 * CHUNK + 2 * SNAPSHOT, learned)
    tier.serve(0, 1, 2, 3)
    tier.serve(1, 1, 4)
    for place in range(3):
        tier.serve(100.0 + place, 50 + place, 60 + place)
    assert tier.has(1, 2, 3, 4, tag="f0") == [False] * 4


@pytest.mark.parametrize(
    ("geometry", "needed"),
    [(STATES, 4 * CHUNK + SNAPSHOT), (DENSE, 6 * CHUNK), (WINDOWS, 6 * CHUNK + 2 * WINDOW)],
    ids=["states", "dense", "windows"],
)
def test_a_prompt_that_is_asked_again_and_again_outlives_younger_ones(geometry: Geometry, needed: int) -> None:
    tier = Tier(geometry, 4 * needed, learned)
    for round_number in range(60):
        at = 30.0 * round_number
        tier.serve(at, 1, 2, 3, 4)
        for place in range(8):
            block = 1000 + 100 * round_number + 10 * place
            tier.serve(at + 1 + place, *range(block, block + 4))
    assert tier.serve(1800.0, 1, 2, 3, 4) == 256


def test_of_a_window_model_what_lies_inside_a_prompt_goes_first() -> None:
    tier = Tier(WINDOWS, 9 * CHUNK + 6 * WINDOW, learned)
    tier.serve(0, 1, 2, 3, 4, 5)
    tier.serve(10, 6, 7, 8)
    tags = [(object_id.tag, object_id.key[0]) for object_id in tier.evicted]
    assert tags == [("w1", 1), ("w1", 2)]
    assert tier.serve(20, 1, 2, 3, 4, 5, 9) == 320


@settings(max_examples=100, deadline=None)
@given(conversations(), st.integers(2_000, 40_000), st.sampled_from([DENSE, WINDOWS]))
def test_without_states_it_agrees_with_its_index(requests, capacity, geometry) -> None:
    tier = Tier(geometry, capacity, learned)
    for at, prompt in requests:
        tier.serve(at, *prompt)
        check_integrity(tier.shelf.index)
        check_runs(tier.shelf.index, tier.policy)


def test_the_same_seed_gives_the_same_victims_and_another_one_others() -> None:
    def evicted(seed: int) -> list[ObjectId]:
        tier = Tier(STATES, 100 * (CHUNK + SNAPSHOT), lambda clock: LearnedEviction(clock, seed))
        for place in range(300):
            tier.serve(float(place), 1000 + place)
        return tier.evicted

    assert evicted(1) == evicted(1) != evicted(2)


def test_what_was_learned_is_kept_over_a_restart() -> None:
    """Before the restart a prompt's end was used again after a minute, and each junction never."""
    tier = Tier(STATES, None, learned)
    for place in range(200):
        tier.serve(60.0 * place, 1, *range(100, 100 + place))
    policy = LearnedEviction(tier.clock, learned=msgspec.json.decode(as_json(tier.policy), type=Learned))
    assert policy.learned() == tier.policy.learned() != LearnedEviction().learned()


def as_json(policy: EvictionPolicy) -> bytes:
    assert isinstance(policy, LearnedEviction)
    return msgspec.json.encode(policy.learned())


def test_memory_of_what_is_gone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "NUM_GHOSTS", 10)
    tier = Tier(STATES, 2 * (CHUNK + SNAPSHOT), learned)
    for place in range(100):
        tier.serve(float(place), place)
    assert len(tier.policy._ghosts) == 10
    assert not tier.policy._ghosts._passed


def names_of(item: Ranked) -> list[ObjectId]:
    return [item.object_id, *item.others]


@settings(max_examples=100, deadline=None)
@given(conversations(), st.integers(2_000, 40_000), st.sampled_from([STATES, DENSE, WINDOWS]))
def test_a_ranking_names_all_that_may_go_and_points_once(requests, capacity, geometry) -> None:
    tier = Tier(geometry, capacity, learned)
    for at, prompt in requests:
        tier.serve(at, *prompt)
    tier.clock.now += UNFINISHED_S
    ranking = list(tier.policy.ranking())
    named = [object_id for item in ranking for object_id in names_of(item)]
    assert {entry.object_id for entry in tier.policy._offered} <= set(named)
    assert geometry is WINDOWS or len(named) == len(set(named))
    assert all(item.until <= tier.clock.now for item in ranking)
    assert all(item.used_at is None or item.used_at <= item.until for item in ranking)


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_what_would_be_evicted_is_ranked_the_lowest(requests) -> None:
    tier = Tier(STATES, None, learned)
    for at, prompt in requests[:20]:
        tier.serve(at, *prompt)
    values = {item.object_id: item.value for item in tier.policy.ranking()}
    if 0 < len(values) <= 64:  # so many are compared
        assert values[tier.policy.pop().object_id] == min(values.values())


@settings(max_examples=100, deadline=None)
@given(conversations(), st.integers(2_000, 20_000), st.sampled_from([STATES, DENSE, WINDOWS]), st.integers(1, 7))
def test_a_ranking_goes_on_while_objects_come_and_go(requests, capacity, geometry, step) -> None:
    tier = Tier(geometry, capacity, learned)
    ranking = iter(())
    for at, prompt in requests:
        tier.serve(at, *prompt)
        part = list(islice(ranking, step))
        assert all(tier.shelf.index.has(object_id) for item in part for object_id in names_of(item))
        if len(part) < step:
            ranking = tier.policy.ranking()


@pytest.mark.parametrize("geometry", [STATES, DENSE], ids=["states", "dense"])
def test_what_was_only_found_is_not_ranked_and_nothing_is_learned_from_it_until_it_is_used(geometry) -> None:
    planner = HybridOffloadPlanner(geometry)
    policy = LearnedEviction(Clock())
    policy.serve(geometry)
    index = PrefixIndex(None, policy)
    prompts = []
    for place in range(300):
        keys = [bytes([1]) * 8, place.to_bytes(8, "little")]
        prompts.append(planner.store_plan(keys, {}, 128))
        if geometry is STATES:
            prompts[-1].append(planner.snapshot(keys, 128))
        index.restore(prompts[-1])
    assert list(policy.ranking()) == []
    names = [item.object_id for item in prompts[7]]
    assert index.pin(names)
    index.unpin(names)
    assert [names_of(item) for item in policy.ranking()] == [[names[-1]]]
    assert policy.learned() == LearnedEviction().learned()


def test_a_prompt_that_is_being_stored_is_not_ranked_until_its_state_is_there_or_long_overdue() -> None:
    planner, clock = HybridOffloadPlanner(STATES), Clock()
    policy = LearnedEviction(clock)
    policy.serve(STATES)
    index = PrefixIndex(None, policy)
    tickets = count(1)

    def store(items: Sequence[PlannedObject]) -> None:
        for item in items:
            entry = index.reserve(item, next(tickets))
            assert entry is not None
            index.commit(entry.ticket)

    done, given_up = [bytes([1]) * 8], [bytes([2]) * 8]
    for keys in (done, given_up):
        store(planner.store_plan(keys, {}, 64))
    assert list(policy.ranking()) == []
    state = planner.snapshot(done, 64)
    store([state])
    assert [names_of(item) for item in policy.ranking()] == [[state.object_id]]
    clock.now += UNFINISHED_S
    chunk = planner.store_plan(given_up, {}, 64)[0]
    assert {names_of(item)[0] for item in policy.ranking()} == {state.object_id, chunk.object_id}


def test_of_a_dense_model_a_place_where_prompts_part_is_ranked_below_what_is_on_top_of_it() -> None:
    tier = Tier(DENSE, None, learned)
    tier.serve(0, 1, 2, 3)
    tier.serve(5, 1, 2, 4)
    found = {item.object_id.key[0]: item for item in tier.policy.ranking()}
    assert sorted(found) == [2, 3, 4]
    assert [found[block].used_at for block in (2, 3, 4)] == [5, 0, 5]


def test_chunks_whose_state_somebody_else_has_evicted_are_of_no_use() -> None:
    tier = Tier(STATES, None, learned)
    tier.serve(0, 1, 2)
    tier.serve(1, 3)
    tier.shelf.index.drop(ObjectId("s", (2).to_bytes(8, "little")))
    useless = [names_of(item) for item in tier.policy.ranking() if item.used_at is None]
    assert useless == [[ObjectId("f0", (2).to_bytes(8, "little"))]]


def test_chunks_that_are_used_without_their_window_are_not_the_first_to_go() -> None:
    """A run that had lost its point, and so went before all others, has one again when a request uses it."""
    tier = Tier(WINDOWS, None, learned)
    tier.serve(0, 1, 2)
    tier.serve(1, 3, 4)
    last = ObjectId("f0", (2).to_bytes(8, "little"))
    tier.shelf.index.drop(ObjectId("w1", last.key))
    tier.shelf.index.touch([last])
    useless = [object_id for item in tier.policy.ranking() if item.used_at is None for object_id in names_of(item)]
    assert last not in useless


def test_of_a_dense_model_what_goes_while_a_ranking_is_under_way_is_not_named() -> None:
    tier = Tier(DENSE, None, learned)
    tier.serve(0, 1, 2, 3)
    tier.serve(5, 1, 2, 4)
    ranking = tier.policy.ranking()
    next(ranking)
    tier.shelf.index.drop(ObjectId("f0", (1).to_bytes(8, "little")))
    assert list(ranking) == []
