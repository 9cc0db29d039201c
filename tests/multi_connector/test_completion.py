# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.multi_connector.completion import Completions
from vllm_overlay.multi_connector.metadata import NULL_BLOCK, Load


def remembered(open_):
    """How many entries its tables of requests have."""
    return sum(len(table) for table in vars(open_).values() if isinstance(table, dict | set))


def test_a_request_is_sent_when_every_holder_has_reported():
    open_ = Completions()
    open_.expect_saves("r", [0, 2])
    assert open_.sent(2, {"r"}) == 0
    assert open_.take().finished_sending == set()
    assert open_.sent(0, {"r"}) == 0
    assert open_.take().finished_sending == {"r"}
    assert remembered(open_) == 0


def test_a_repeated_or_foreign_report_of_a_save_frees_nothing():
    open_ = Completions()
    open_.expect_saves("r", [0, 1])
    assert open_.sent(0, {"r"}) == 0
    assert open_.sent(0, {"r"}) == 1
    assert open_.sent(2, {"r"}) == 1
    assert open_.sent(0, {"unknown"}) == 1
    assert open_.take().finished_sending == set()


def test_only_the_chosen_child_ends_a_load_and_only_once():
    open_ = Completions()
    open_.expect_load("r", Load(1))
    assert open_.received(0, {"r"}, ()) == 1
    assert open_.take().finished_recving == set()
    assert open_.received(1, {"r"}, ()) == 0
    assert open_.received(1, {"r"}, ()) == 1
    done = open_.take()
    assert (done.finished_recving, done.failed_recving) == ({"r"}, set())
    assert open_.take().finished_recving == set()


def test_a_failure_told_early_is_reported_with_the_end_of_the_load():
    open_ = Completions()
    open_.expect_load("r", Load(1))
    open_.received(1, (), {"r"})
    assert open_.take() == Completions().take()
    open_.received(1, {"r"}, ())
    done = open_.take()
    assert (done.finished_recving, done.failed_recving) == ({"r"}, {"r"})


def test_a_failure_of_another_childs_load_is_not_believed():
    open_ = Completions()
    open_.expect_load("r", Load(1))
    open_.received(0, (), {"r"})
    open_.received(1, {"r"}, ())
    assert open_.take().failed_recving == set()


def test_a_second_load_of_a_request_does_not_inherit_the_first_ones_failure():
    open_ = Completions()
    open_.expect_load("r", Load(1))
    open_.received(1, (), {"r"})
    open_.expect_load("r", Load(0))
    open_.received(0, {"r"}, ())
    assert open_.take().failed_recving == set()


def test_abandoning_a_child_fails_its_loads_and_releases_its_saves():
    open_ = Completions()
    open_.expect_load("mine", Load(0))
    open_.expect_load("other", Load(1))
    open_.expect_saves("both", [0, 1])
    open_.expect_saves("only", [0])
    open_.abandon(0)
    done = open_.take()
    assert (done.finished_recving, done.failed_recving, done.finished_sending) == ({"mine"}, {"mine"}, {"only"})
    assert open_.sent(1, {"both"}) == 0
    assert open_.take().finished_sending == {"both"}


def test_a_refused_load_fails_at_once():
    open_ = Completions()
    open_.refuse_load("r", Load(0))
    done = open_.take()
    assert (done.finished_recving, done.failed_recving) == ({"r"}, {"r"})
    open_.requests_changed((), {"r"})
    assert remembered(open_) == 0


def test_a_failed_synchronous_load_invalidates_its_blocks_and_is_not_received():
    open_ = Completions()
    open_.expect_load("r", Load(0, (4, 5), is_synchronous=True))
    open_.abandon(0)
    done = open_.take()
    assert (open_.take_invalid_blocks(), done.finished_recving, done.failed_recving) == ({4, 5}, set(), set())


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


def test_bad_blocks_are_those_of_a_childs_loads_till_their_requests_are_finished():
    open_ = living("r")
    open_.expect_load("r", Load(0, (8, 9)))
    for child in (0, 1):
        with pytest.raises(ValueError, match=r"\[7\]" if child == 0 else r"\[7, 9\]"):
            open_.load_errors(child, {NULL_BLOCK, 7, 9})
    assert open_.take_invalid_blocks() == {9}
    open_.received(0, {"r"}, ())
    open_.load_errors(0, {8})
    assert (open_.take().failed_recving, open_.take_invalid_blocks()) == (set(), {8})
    open_.requests_changed((), {"r"})
    with pytest.raises(ValueError, match="not told to load"):
        open_.load_errors(0, {8})
    assert remembered(open_) == 0


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


def test_a_save_reported_while_its_request_lives_counts_once_it_is_finished():
    open_ = living("r")
    assert open_.sent(0, {"r"}) == 0
    assert open_.take().finished_sending == set()
    open_.expect_saves("r", [0])
    open_.requests_changed((), {"r"})
    assert open_.take().finished_sending == {"r"}
    assert remembered(open_) == 0


def test_an_early_report_of_one_child_is_not_anothers():
    open_ = living("r")
    open_.sent(0, {"r"})
    open_.expect_saves("r", [0, 1])
    assert open_.take().finished_sending == set()
    open_.sent(1, {"r"})
    assert open_.take().finished_sending == {"r"}


def test_an_early_report_of_a_request_that_nobody_holds_is_forgotten():
    open_ = living("r")
    open_.sent(0, {"r"})
    open_.requests_changed((), {"r"})
    assert remembered(open_) == 0
    assert open_.sent(0, {"r"}) == 1
    assert remembered(open_) == 0


def test_what_the_scheduler_released_is_owed_no_longer():
    open_ = Completions()
    open_.expect_saves("r", [0, 1])
    open_.release("r")
    open_.release("unknown")
    assert not open_.owes(0) and not open_.owes(1)
    assert open_.take().finished_sending == set()


def test_synchronous_loads_can_fail_while_the_rest_is_still_owed():
    open_ = Completions()
    open_.expect_load("now", Load(0, (4, 5), is_synchronous=True))
    open_.expect_load("later", Load(0))
    open_.fail_synchronous(0)
    done = open_.take()
    assert (open_.take_invalid_blocks(), done.failed_recving) == ({4, 5}, set())
    assert open_.owes(0)


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
