# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_overlay.multi_connector.outstanding import OutstandingReports
from vllm_overlay.multi_connector.report_view import Changes, Reports


def reports(sent="", received="", failed=""):
    return Reports(frozenset(sent), frozenset(received), frozenset(failed))


def accept(outstanding, shown=None, now=1.0, **changed):
    """``changed``: a1_b becomes child 1's change ``a_b``, request ids as letters."""
    changes = {}
    for name, ids in changed.items():
        child = int(next(letter for letter in name if letter.isdigit()))
        known = changes.get(child, Changes())
        fields = {slot: getattr(known, slot) for slot in Changes.__slots__}
        changes[child] = Changes(**{**fields, name.replace(str(child), ""): frozenset(ids)})
    return outstanding.accept(shown or Reports(), changes, now)


def held(*children):
    outstanding = OutstandingReports()
    outstanding.hold("r", frozenset(children))
    return outstanding


def loading(child=1):
    outstanding = OutstandingReports()
    outstanding.load_started("r", child=child, tokens=64, now=1.0)
    return outstanding


def test_it_passes_a_report_once():
    outstanding = loading(child=1)
    assert outstanding.loader_of("r") == 1
    accepted = accept(outstanding, reports(received="r", failed="r"), now=1.5)
    assert (accepted.may_receive, accepted.may_send) == ({"r"}, set())
    (ended,) = accepted.ended
    assert (ended.child, ended.tokens, ended.seconds, ended.failed) == (1, 64, 0.5, True)
    again = accept(outstanding, reports(sent="r", received="r"), now=2.0)
    assert (again.may_receive, again.may_send, again.ended) == (set(), set(), [])


@pytest.mark.parametrize("load_first", [True, False])
def test_it_passes_both_reports_of_an_aborted_request(load_first):
    outstanding = loading(child=0)
    outstanding.hold("r", frozenset({1}))
    both = [(reports(received="r"), ({"r"}, set())), (reports(sent="r"), (set(), {"r"}))]
    for report, passed in both if load_first else reversed(both):
        accepted = accept(outstanding, report)
        assert (accepted.may_receive, accepted.may_send) == passed
    assert outstanding.open_requests == 0


def test_it_passes_both_reports_when_they_come_together():
    outstanding = loading(child=0)
    outstanding.hold("r", frozenset({1}))
    accepted = accept(outstanding, reports(sent="r", received="r"))
    assert (accepted.may_receive, accepted.may_send) == ({"r"}, {"r"})


def test_blocks_that_a_child_takes_out_of_the_report_stay_held_until_it_puts_them_in():
    outstanding = held(0, 1)
    assert accept(outstanding, reports(sent="r"), sent1_removed="r").may_send == set()
    assert outstanding.holders_of("r") == {1}
    accepted = accept(outstanding, sent1_added="r")
    assert (accepted.may_send, accepted.releases) == ({"r"}, {})
    assert outstanding.open_requests == 0


def test_blocks_that_a_child_gives_up_are_free_when_no_other_holds_them():
    outstanding = held(0, 1)
    accepted = accept(outstanding, sent0_added="r")
    assert (accepted.may_send, accepted.releases) == (set(), {"r": {0}})
    assert accept(outstanding, sent1_added="r").may_send == {"r"}


def test_a_child_cannot_free_or_keep_what_another_holds():
    outstanding = held(0)
    accepted = accept(outstanding, sent1_added="r")
    assert (accepted.may_send, accepted.ignored, accepted.releases) == (set(), {1: 1}, {})
    assert accept(outstanding, reports(sent="r"), sent1_removed="r").may_send == {"r"}


def test_a_load_that_its_child_takes_out_of_the_report_is_told_when_it_puts_it_in():
    outstanding = loading(child=1)
    accepted = accept(outstanding, reports(received="r", failed="r"), received1_removed="r")
    assert (accepted.may_receive, accepted.ended) == (set(), [])
    accepted = accept(outstanding, received1_added="r")
    assert accepted.may_receive == {"r"}
    assert accepted.ended[0].failed


def test_no_child_can_end_a_load_that_the_workers_have_not_reported():
    outstanding = loading(child=1)
    accepted = accept(outstanding, received0_added="r", received1_added="r")
    assert (accepted.may_receive, accepted.ignored) == (set(), {0: 1, 1: 1})
    assert outstanding.loader_of("r") == 1


def test_another_child_cannot_take_a_load_out():
    assert accept(loading(child=1), reports(received="r"), received0_removed="r").may_receive == {"r"}


def test_a_child_out_of_service_puts_in_what_it_had_taken_out():
    outstanding = held(0)
    outstanding.load_started("s", child=0, tokens=64, now=1.0)
    accept(outstanding, reports(sent="r", received="s"), sent0_removed="r", received0_removed="s")
    accepted = outstanding.accept(Reports(), {0: outstanding.all_put_in(0)}, 2.0)
    assert (accepted.may_send, accepted.may_receive) == ({"r"}, {"s"})
    assert outstanding.all_put_in(0) == Changes()
