# SPDX-License-Identifier: Apache-2.0
import json
from bisect import bisect_left
from collections import Counter
from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.metrics import BUCKETS
from vllm_overlay.tally import Buckets, ReportTimes, Tally

BOUNDS = BUCKETS["load_seconds"]
SECONDS = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 200, allow_nan=False))


def filled(values: list[float]) -> Tally:
    tally = Tally()
    for value in values:
        tally.observe("load_seconds", value)
    return tally


def sent(tally: Tally) -> Tally:
    """As another process gets it."""
    return Tally.from_dict(json.loads(json.dumps(tally.to_dict())))


def by_bucket(values: list[float]) -> Counter[int]:
    return Counter(bisect_left(BOUNDS, value) for value in values)


@given(st.lists(SECONDS), st.lists(SECONDS, min_size=1))
def test_what_arrives_falls_into_the_buckets_of_what_was_observed(here: list[float], there: list[float]) -> None:
    total = sent(filled(here))
    total.add(sent(filled(there)))
    buckets = total.histograms["load_seconds"]
    arrived = list(buckets.observations())
    assert by_bucket(arrived) == by_bucket(here + there)
    assert isclose(sum(arrived), sum(here + there), rel_tol=1e-9, abs_tol=1e-12)
    assert buckets.count == len(here + there)


def test_many_observations_of_a_bound_stay_in_its_bucket() -> None:
    # The mean of three times 0.1 is a little more than 0.1.
    buckets = Buckets(BOUNDS)
    for _ in range(3):
        buckets.observe(0.1)
    assert list(buckets.observations()) == [0.1] * 3


def test_its_size_does_not_grow_with_the_observations() -> None:
    (cells,) = filled([0.0005, 0.2] * 5000).to_dict()["histograms"].values()
    assert len(cells) == 2


def test_counters_add_up_by_label_and_the_last_level_stays() -> None:
    one, two = Tally(gauges={"state": 1}), Tally(gauges={"state": 2})
    one.count("errors", label="x")
    for label in ("x", "y"):
        two.count("errors", 2, label)
    two.count("errors_more", 8)
    one.add(sent(two))
    assert one == Tally({"errors:x": 3, "errors:y": 2, "errors_more": 8}, gauges={"state": 2})
    assert (one.total("errors"), one.total("hangs")) == (5, 0)


def test_what_is_added_stays_as_it_was() -> None:
    total, part = Tally(), filled([0.1])
    total.add(part)
    total.add(part)
    assert (total.histograms["load_seconds"].count, part.histograms["load_seconds"].count) == (2, 1)


def test_nothing_is_nothing_to_report() -> None:
    tally = Tally()
    tally.count("loaded_tokens", 0)
    assert tally.is_empty()


def test_what_was_taken_is_not_taken_again() -> None:
    tally = filled([0.1])
    assert not tally.take().is_empty()
    assert tally.take().is_empty()


def test_reports_are_due_four_times_a_second() -> None:
    now = 100.0
    times = ReportTimes(lambda: now)
    due = []
    for _ in range(24):
        due.append(times.is_due())
        now += 1 / 16
    assert due == [True, False, False, False] * 6
    now += 100.0
    assert [times.is_due(), times.is_due()] == [True, False]
