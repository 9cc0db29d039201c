# SPDX-License-Identifier: Apache-2.0
"""A trace that is made smaller keeps what its requests share, and says how much that is."""

from bench.scaled_trace import Reuse, Scale, ScaledRequest, parts, reuse, sample, sessions
from bench.trace import TraceRequest

SCALE = Scale(block_tokens=128, most_tokens=4096)
SYSTEM = 0


def request(at: float, *blocks: int, tail: int = 100, output: int = 40) -> TraceRequest:
    return TraceRequest(at, len(blocks) * 512 + tail, output, blocks)


def chats(number: int, turns: int) -> list[TraceRequest]:
    """Each turn has its chat's blocks of before and one more; all have the system prompt."""
    blocks = {chat: [SYSTEM, *range(100 * chat + 1, 100 * chat + turns + 1)] for chat in range(number)}
    return [
        request(10 * turn + chat / number, *blocks[chat][: turn + 2]) for turn in range(turns) for chat in range(number)
    ]


def test_a_session_is_a_chat_although_all_share_a_system_prompt():
    found = sessions(chats(200, turns=3))
    assert len(found) == 200
    assert all(len(session) == 3 and len({one.block_ids[1] for one in session}) == 1 for session in found)


def test_a_request_with_nothing_but_what_all_have_is_a_session_of_its_own():
    found = sessions([request(0, SYSTEM) for _ in range(300)])
    assert [len(session) for session in found] == [1] * 300


def test_a_sample_is_made_of_whole_sessions_in_the_order_of_arrival():
    trace = chats(200, turns=3)
    chosen = sample(trace, 31, seed=1)
    assert len(chosen) == 31 and chosen == sorted(chosen, key=lambda one: one.arrival_s)
    of_chats = sorted(len(session) for session in sessions([*trace, *chosen]) if len(session) > 3)
    assert of_chats == [4] + [6] * 10  # ten whole chats, and one of which a turn was left
    assert chosen == sample(trace, 31, seed=1) != sample(trace, 31, seed=2)
    assert len(sample(trace, 1000, seed=1)) == 600


def test_equal_blocks_are_equal_tokens_and_the_rest_is_nobody_elses():
    one, other = SCALE.requests([request(0, 7, 8), request(1, 7, 9)], 10.0, seed=0)
    assert len(one.prompt) == len(other.prompt) == 2 * 128 + 25
    assert one.prompt[:128] == other.prompt[:128]
    assert one.prompt[128:256] != other.prompt[128:256]
    same, again = SCALE.requests([request(0, 7, 8), request(1, 7, 8)], 10.0, seed=0)
    assert same.prompt[:256] == again.prompt[:256] and same.prompt[256:] != again.prompt[256:]


def test_a_long_prompt_loses_its_end_and_leaves_room_for_the_answer():
    (long,) = SCALE.requests([request(0, *range(100), output=8000)], 10.0, seed=0)
    assert (len(long.prompt), long.max_tokens) == (4096 - 2000, 2000)
    (short,) = SCALE.requests([request(0, *range(3), tail=0)], 10.0, seed=0)
    assert long.prompt[: 3 * 128] == short.prompt


def test_arrivals_shrink_to_the_seconds_given_and_begin_anew_with_each_part():
    trace = [request(at, at) for at in (100, 110, 120, 140, 200)]
    scaled = SCALE.requests(trace, 10.0, seed=0)
    assert [one.arrival_s for one in scaled] == [0.0, 1.0, 2.0, 4.0, 10.0]
    assert [[one.arrival_s for one in part] for part in parts(scaled, 2)] == [[0.0, 1.0, 2.0], [0.0, 6.0]]


def plain(*tokens: int) -> ScaledRequest:
    return ScaledRequest(0.0, tuple(tokens), 1)


def test_what_could_be_restored_is_counted_in_match_units_below_the_last_token():
    assert reuse([plain(1, 2, 3, 4, 5), plain(1, 2, 3, 4, 6), plain(1, 2, 9, 4, 5)], 2) == Reuse(15, 4 + 2, 3 * 2, 2)
    assert reuse([plain(1, 2, 3, 4), plain(1, 2, 3, 4)], 2).shared == 2  # never the whole prompt


def test_equal_tokens_after_other_ones_are_not_shared():
    first, second, third = plain(1, 2, 3, 4, 0), plain(5, 6, 7, 8, 0), plain(1, 2, 7, 8, 0)
    assert reuse([first, second, third], 2) == Reuse(15, 2, 5 * 2, 3)
