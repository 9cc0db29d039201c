# SPDX-License-Identifier: Apache-2.0
"""A tier can be measured before it is used: what it would have brought is counted, by the switch that says no."""

import pytest

from tests.multi_connector.fakes import blocks, child, request
from tests.multi_connector.lockstep import admit, allocated, answering, answers_it, by_label, reported, tally_of


def two(answer, **settings):
    """A child with these settings and this answer, and one that has nothing."""
    return answering(answer, 0, children=(child("a", **settings), child("b")))


def ignored(connector, name="a"):
    found = tally_of(connector, name)
    return by_label(found, "ignored_offers"), by_label(found, "ignored_offer_tokens")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"load": False}, "load_off"),
        ({"min_tokens": 65}, "min_tokens"),
        ({"load": False, "min_tokens": 65}, "load_off"),
    ],
)
def test_what_a_switch_leaves_out_is_counted_in_requests_and_tokens(settings, reason):
    connector = two(64, **settings)
    assert admit(connector, "first") == admit(connector, "second") == 0
    assert ignored(connector) == ({reason: 2}, {reason: 128})
    assert ignored(connector, "b") == ({}, {})
    found = tally_of(connector)
    assert [found.total(one) for one in ("queries", "offered_tokens", "outbid", "too_slow")] == [2, 0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "settings", "loaded"),
    [(64, {"min_tokens": 64}, 64), (0, {"load": False}, 0), (None, {"load": False}, 0)],
)
def test_an_offer_that_is_taken_or_none_is_not_ignored(answer, settings, loaded):
    connector = two(answer, **settings)
    assert admit(connector) == loaded
    assert ignored(connector) == ({}, {})


def test_it_is_counted_once_at_admission_however_often_the_lookup_is_made():
    connector = two(64, load=False)
    for _ in range(5):
        connector.get_num_new_matched_tokens(request(), 0)
    assert ignored(connector) == ({}, {})
    for _ in range(2):
        connector.update_state_after_alloc(request(), blocks(1), 0)
    assert ignored(connector) == ({"load_off": 1}, {"load_off": 64})


def test_a_child_that_has_failed_too_often_for_a_request_is_ignored():
    connector = two(64, max_load_attempts=1)
    assert admit(connector) == 64
    reported(connector, failed="r")
    assert admit(connector) == 0
    assert ignored(connector) == ({"attempts": 1}, {"attempts": 64})


def test_a_child_that_gets_no_blocks_of_a_request_any_more_is_ignored():
    connector = two(64, store=False, load_weight=0.5)
    answers_it(connector.sub_connectors[1], 64)
    assert admit(connector) == 64  # from the other
    reported(connector, failed="r")
    answers_it(connector.sub_connectors[1], 0)
    assert admit(connector) == 0
    assert allocated(connector.sub_connectors[0]) == []
    assert ignored(connector) == ({"withheld": 1}, {"withheld": 64})
