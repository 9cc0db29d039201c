# SPDX-License-Identifier: Apache-2.0
"""Objects of a case, and where they lie in host memory."""

import random

from hypothesis import strategies as st

from tests.transfer import naive
from tests.transfer.naive import NUM_BLOCKS, Case
from vllm_overlay.tiers.memory import HostBuffer, HostPool, units_needed
from vllm_overlay.transfer.base import Placement, Span


@st.composite
def spans(draw: st.DrawFn, case: Case) -> Span:
    """Any tokens of any block, cut at the case's unit."""
    start = draw(st.integers(0, case.block_size // case.unit - 1))
    end = draw(st.integers(start + 1, case.block_size // case.unit))
    return Span(0, draw(st.integers(0, NUM_BLOCKS - 1)), start * case.unit, (end - start) * case.unit)


def orders(count: int) -> st.SearchStrategy[list[int]]:
    """A pool's units as an allocator may hand them out: upwards, downwards, in any order."""
    up = list(range(count))
    shuffled = st.integers(0, 1 << 32).map(lambda seed: random.Random(seed).sample(up, count))
    return st.sampled_from([up, up[::-1]]) | shuffled


@st.composite
def chunks(draw: st.DrawFn, case: Case) -> tuple[list[Placement], list[HostBuffer], HostPool]:
    """Different chunks, in runs or in any order, in units that follow each other or do not."""
    divisors = [n for n in range(case.unit, case.block_size + 1, case.unit) if case.block_size % n == 0]
    size = draw(st.sampled_from(divisors))
    places = [(block, at) for block in range(NUM_BLOCKS) for at in range(0, case.block_size, size)]
    if draw(st.booleans()):
        places = draw(st.permutations(places))
    places = places[: draw(st.integers(1, len(places)))]
    num_bytes = size * case.attention.token_bytes
    pool = naive.random_pool(2 * len(places), num_bytes + draw(st.sampled_from([0, 4, 4096])), seed=1)
    units = draw(orders(pool.num_units))
    placements = [Placement(spans=(Span(0, block, at, size),)) for block, at in places]
    return placements, [pool.buffer([units[n]], num_bytes) for n in range(len(places))], pool


@st.composite
def objects(draw: st.DrawFn, case: Case) -> tuple[Placement, HostBuffer, HostPool]:
    """Pages, spans or both, over several units in any order."""
    pages = draw(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, NUM_BLOCKS - 1)), max_size=3, unique=True))
    in_pages = {block for group_id, block in pages if group_id == 0}
    tails = draw(st.lists(spans(case), min_size=0 if pages else 1, max_size=2, unique_by=lambda span: span.block_id))
    placement = Placement(tuple(pages), tuple(span for span in tails if span.block_id not in in_pages))
    num_bytes = max(1, naive.num_bytes_of(case.groups, placement))
    unit_bytes = draw(st.sampled_from([64, 1000, 4096, num_bytes]))
    needed = units_needed(num_bytes, unit_bytes)
    pool = naive.random_pool(needed + 3, unit_bytes, seed=2)
    return placement, pool.buffer(draw(orders(pool.num_units))[:needed], num_bytes), pool
