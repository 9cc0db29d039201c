# SPDX-License-Identifier: Apache-2.0
"""One rank's books, where no child of the other tests brings them: most of their rules have their test in a step."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.multi_connector.completion import Completions
from vllm_overlay.multi_connector.metadata import Load


def remembered(open_):
    """How many entries its tables of requests have."""
    return sum(len(table) for table in vars(open_).values() if isinstance(table, dict | set))


def test_bad_blocks_of_an_aborted_request_are_known_till_its_load_has_ended():
    open_ = Completions()
    open_.requests_changed({"r"}, ())
    open_.expect_load("r", Load(0, (8, 9)))
    open_.requests_changed((), {"r"})
    open_.load_errors(0, {8})
    assert open_.take_invalid_blocks() == {8}
    open_.received(0, {"r"}, ())
    assert remembered(open_) == 0


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
