# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's and the bookkeeper's threads share: bytes to write, and files that must not go."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.room import Holds, Room

WRITER = "f" * 16
SIZES = st.integers(0, 100)
STEPS = st.lists(st.tuples(st.sampled_from(["grow", "reserve", "commit", "release", "take_back"]), SIZES), max_size=60)


def begun() -> Room:
    """A writer's, who was granted nothing yet."""
    room = Room()
    room.begin(WRITER, 0)
    return room


@given(STEPS)
def test_room_is_what_was_granted_less_what_stores_have_taken_and_never_negative(steps):
    room, granted, in_flight, largest = begun(), 0, [], 0
    for step, num_bytes in steps:
        match step:
            case "grow":
                room.grow(num_bytes)
                granted += num_bytes
            case "reserve":
                fits = num_bytes <= granted - sum(in_flight)
                assert room.reserve(num_bytes) == (WRITER if fits else "")
                largest = max(largest, num_bytes)
                if fits:
                    in_flight.append(num_bytes)
            case "commit" if in_flight:
                granted -= in_flight[0]
                room.release(in_flight.pop(0), is_paid=True)
            case "release" if in_flight:
                room.release(in_flight.pop())
            case "take_back":
                taken = room.take_back(num_bytes)
                assert taken == min(num_bytes, granted - sum(in_flight))
                granted -= taken
        assert room.in_flight == sum(in_flight)
        assert room.available + room.in_flight == granted
        assert room.available >= 0
        assert room.largest_bytes == largest


def test_a_grant_that_is_lost_under_stores_gives_nothing_until_they_have_ended():
    room = begun()
    room.grow(100)
    assert room.reserve(60)
    room.set_granted(0)
    assert room.available == -60
    assert not room.reserve(0) and room.take_back(10) == 0
    room.grow(70)
    assert room.available == 10
    room.release(60)
    assert room.reserve(70)


def test_stores_of_a_writer_before_take_from_the_next_ones_grant_until_they_have_ended():
    room, later = begun(), "e" * 16
    assert room.reserve(0) == WRITER
    room.grow(100)
    assert room.reserve(60) == WRITER
    room.begin(later, 70)
    assert room.available == 10
    assert room.reserve(10) == later
    room.release(60)
    assert room.reserve(60) == later


FILES = st.integers(0, 5).map(lambda number: File(WRITER, number))
HOLD_STEPS = st.lists(
    st.tuples(st.sampled_from(["hold", "release", "claim", "unclaim"]), st.lists(FILES, max_size=4)), max_size=40
)


@given(HOLD_STEPS)
def test_what_is_held_cannot_be_claimed_and_what_is_claimed_cannot_be_held(steps):
    holds, held, going = Holds(), [], set()
    for step, files in steps:
        counts = Counter(file for group in held for file in group)
        match step:
            case "hold":
                may = going.isdisjoint(files)
                assert holds.hold(iter(files)) == may
                if may:
                    held.append(files)
            case "release" if held:
                holds.release(held.pop(0))
            case "claim":
                assert holds.claim(iter(files)) == set(files) - set(counts)
                going |= set(files) - set(counts)
            case "unclaim":
                holds.unclaim(iter(files))
                going -= set(files)
        now = {file for group in held for file in group}
        assert holds.held() == now
        assert now.isdisjoint(going)
