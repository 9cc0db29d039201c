# SPDX-License-Identifier: Apache-2.0
from bisect import bisect_left
from collections import Counter
from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.common.buckets import Buckets

BOUNDS = (0.001, 0.1, 0.3, 1.0)
SECONDS = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 10, allow_nan=False))


def filled(values):
    buckets = Buckets(BOUNDS)
    for value in values:
        buckets.observe(value)
    return buckets


def by_bucket(values):
    return Counter(bisect_left(BOUNDS, value) for value in values)


@given(st.lists(SECONDS), st.lists(SECONDS))
def test_what_arrives_falls_into_the_buckets_of_what_was_observed(here, there):
    total = Buckets.from_list(BOUNDS, filled(here).to_list())
    total.add(Buckets.from_list(BOUNDS, filled(there).to_list()))
    arrived = list(total.observations())
    assert by_bucket(arrived) == by_bucket(here + there)
    assert isclose(sum(arrived), sum(here + there), rel_tol=1e-9, abs_tol=1e-12)
    assert total.count == len(here + there)


def test_many_observations_of_a_bound_stay_in_its_bucket():
    # The mean of three times 0.1 is a little more than 0.1.
    assert list(filled([0.1] * 3).observations()) == [0.1] * 3


def test_its_size_does_not_grow_with_the_observations():
    assert len(filled([0.0005, 0.2] * 5000).to_list()) == 2
