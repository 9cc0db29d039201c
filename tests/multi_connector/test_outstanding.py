# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_overlay.multi_connector.outstanding import OutstandingReports


def test_it_passes_a_report_once():
    outstanding = OutstandingReports()
    outstanding.load_started("r", child=1, tokens=64, now=1.0)
    assert outstanding.loader_of("r") == 1
    may_receive, may_send, (ended,) = outstanding.accept({"r"}, (), {"r"}, now=1.5)
    assert (may_receive, may_send) == ({"r"}, set())
    assert (ended.child, ended.tokens, ended.seconds, ended.failed) == (1, 64, 0.5, True)
    assert outstanding.accept({"r"}, {"r"}, (), now=2.0) == (set(), set(), [])


@pytest.mark.parametrize("load_first", [True, False])
def test_it_passes_only_the_later_report_of_an_aborted_request(load_first):
    outstanding = OutstandingReports()
    outstanding.load_started("r", child=0, tokens=64, now=0.0)
    outstanding.hold("r", frozenset({1}))
    first, second = ((("r",), ()), ((), ("r",))) if load_first else (((), ("r",)), (("r",), ()))
    assert outstanding.accept(*first, (), now=1.0)[:2] == (set(), set())
    assert outstanding.accept(*second, (), now=1.0)[:2] == tuple(set(ids) for ids in second)
    assert outstanding.open_requests == 0


def test_it_passes_one_report_when_both_come_together():
    outstanding = OutstandingReports()
    outstanding.load_started("r", child=0, tokens=64, now=0.0)
    outstanding.hold("r", frozenset({1}))
    may_receive, may_send, _ = outstanding.accept({"r"}, {"r"}, (), now=1.0)
    assert len(may_receive) + len(may_send) == 1
