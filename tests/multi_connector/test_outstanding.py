# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_overlay.multi_connector.outstanding import OutstandingReports


def loading(child=1):
    outstanding = OutstandingReports()
    outstanding.load_started("r", child=child, tokens=64, now=1.0)
    return outstanding


def test_it_passes_a_report_once():
    outstanding = loading(child=1)
    (ended,) = outstanding.loads_ended({"r"}, failed={"r"}, now=1.5)
    assert (ended.child, ended.tokens, ended.seconds, ended.failed) == (1, 64, 0.5, True)
    assert outstanding.loads_ended({"r"}, set(), 2.0) == []
    assert outstanding.saves_ended({"r"}) == set()


@pytest.mark.parametrize("load_first", [True, False])
def test_it_passes_both_reports_of_an_aborted_request(load_first):
    outstanding = loading()
    outstanding.hold("r", {1})
    ends = [lambda: bool(outstanding.loads_ended({"r"}, set(), 2.0)), lambda: outstanding.saves_ended({"r"}) == {"r"}]
    assert all(end() for end in (ends if load_first else reversed(ends)))
    assert not outstanding._loads and not outstanding._held
