# SPDX-License-Identifier: Apache-2.0
"""Where the prompts of a verification end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.verification.prompts import PAST_BOUNDARY, boundaries, extension, make_prompts


@given(
    unit=st.integers(1, 200),
    chunks=st.integers(1, 30),
    blocks=st.integers(1, 30),
    longest=st.integers(1, 10_000),
    seed=st.integers(0, 3),
    drops=st.booleans(),
)
def test_each_prompt_ends_a_few_tokens_past_another_restore_point(
    unit: int, chunks: int, blocks: int, longest: int, seed: int, drops: bool
) -> None:
    """With a drafter that drops a unit of each hit, a unit further on."""
    chunk, block, num_dropped = unit * chunks, unit * blocks, unit * drops
    try:
        prompts = make_prompts(range(50), unit, chunk, block, longest, seed, num_dropped)
    except ValueError:
        assert longest < unit + min(PAST_BOUNDARY, unit) + num_dropped
        return
    assert len({prompt.boundary for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.boundary % unit == 0 and prompt.boundary > 0
        assert prompt.boundary == (len(prompt.tokens) - num_dropped - 1) // unit * unit
        assert num_dropped < len(prompt.tokens) - prompt.boundary <= num_dropped + PAST_BOUNDARY
        assert len(prompt.tokens) <= longest


def test_lengths_lie_around_a_chunk_and_around_blocks() -> None:
    assert boundaries(64, 256, 1152, 8192) == [64, 128, 192, 256, 320, 1088, 1152, 1216, 2240, 2304, 2368]
    assert boundaries(64, 256, 1152, 1200) == [64, 128, 192, 256, 320, 1088, 1152]


def test_an_extension_begins_with_the_prompt_and_is_restored_where_the_prompt_is() -> None:
    (prompt, *_) = make_prompts(range(50), 64, 64, 1152, 8192, seed=0)
    longer = extension(prompt, range(50), 100, seed=1)
    assert longer.tokens[: len(prompt.tokens)] == prompt.tokens
    assert (len(longer.tokens), longer.boundary) == (len(prompt.tokens) + 100, prompt.boundary)


def test_a_server_whose_prompts_are_too_short_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="1152 tokens apart, and the server takes prompts of 1000 at most"):
        make_prompts(range(50), 1152, 1152, 1152, 1000, seed=0)
