# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.multi_connector.completion import Completions
from vllm_overlay.multi_connector.metadata import Load


def remembered(open_):
    """How many entries its tables of requests have."""
    return sum(len(table) for table in vars(open_).values() if isinstance(table, dict | set))


def test_a_failure_told_early_by_the_child_that_loads_is_reported_with_the_end_of_the_load():
    open_ = Completions()
    open_.expect_load("r", Load(1))
    open_.expect_load("s", Load(1))
    open_.received(0, (), {"s"})
    open_.received(1, (), {"r"})
    assert open_.take() == Completions().take()
    open_.received(1, {"r", "s"}, ())
    done = open_.take()
    assert (done.finished_recving, done.failed_recving) == ({"r", "s"}, {"r"})


def test_a_second_load_of_a_request_does_not_inherit_the_first_ones_failure():
    open_ = Completions()
    open_.expect_load("r", Load(1))
    open_.received(1, (), {"r"})
    open_.expect_load("r", Load(0))
    open_.received(0, {"r"}, ())
    assert open_.take().failed_recving == set()


def test_a_synchronous_load_that_its_child_calls_failed_is_told_by_its_blocks():
    open_ = Completions()
    open_.expect_load("r", Load(1, (4, 5), is_synchronous=True))
    open_.received(0, (), {"r"})
    assert open_.take_invalid_blocks() == set()
    open_.expect_load("r", Load(1, (4, 5), is_synchronous=True))
    open_.received(1, (), {"r"})
    done = open_.take()
    assert (open_.take_invalid_blocks(), done.finished_recving, done.failed_recving) == ({4, 5}, set(), set())


def test_a_synchronous_load_ends_with_its_step():
    open_ = Completions()
    open_.expect_load("r", Load(0, (4, 5), is_synchronous=True))
    open_.take()
    open_.abandon(0)
    assert open_.take_invalid_blocks() == set()


def test_bad_blocks_of_an_aborted_request_are_known_till_its_load_has_ended():
    open_ = living("r")
    open_.expect_load("r", Load(0, (8, 9)))
    open_.requests_changed((), {"r"})
    open_.load_errors(0, {8})
    assert open_.take_invalid_blocks() == {8}
    open_.received(0, {"r"}, ())
    assert remembered(open_) == 0


def living(*requests):
    """One rank's books on which these requests have arrived."""
    open_ = Completions()
    open_.requests_changed(requests, ())
    return open_


reports = st.tuples(st.sampled_from(["sent", "received"]), st.integers(0, 2), st.sampled_from("pqr"))


@given(st.dictionaries(st.sampled_from("pqr"), st.frozensets(st.integers(0, 2), min_size=1)), st.lists(reports))
def test_any_order_of_reports_sends_each_request_once_and_only_when_due(promised, stream):
    """Against a naive twin: the set of (request, child) reports seen so far."""
    open_ = Completions()
    for request, holders in promised.items():
        open_.expect_saves(request, holders)
    seen, sent_so_far = set(), set()
    for kind, child, request in stream:
        getattr(open_, kind)(child, {request}, *(((),) if kind == "received" else ()))
        if kind == "sent":
            seen.add((request, child))
        due = {r for r, holders in promised.items() if all((r, holder) in seen for holder in holders)}
        assert open_.take().finished_sending == due - sent_so_far
        sent_so_far |= due
    assert remembered(open_) == len(promised) - len(sent_so_far)
