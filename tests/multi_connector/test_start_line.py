# SPDX-License-Identifier: Apache-2.0
"""One line at start: the children and how one is chosen."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.multi_connector.fakes import child, multi
from vllm_overlay.multi_connector import children


@pytest.fixture
def lines(monkeypatch):
    found = []
    monkeypatch.setattr(children.logger, "info", lambda message, *args: found.append(message % args))
    return found


def about_the_multi_connector(lines):
    return [line for line in lines if line.startswith("MultiConnector: ")]


def test_it_names_children_classes_weights_and_what_is_not_by_default(lines, tmp_path):
    switches = tmp_path / "switches.json"
    multi(
        child("cpu"),
        child("disk", "NamedChild", weight=0.8, store=False, min_tokens=512),
        child("far", weight=2, load=False, promote=False),
        control_file=str(switches),
    )
    assert about_the_multi_connector(lines) == [
        "MultiConnector: cpu (FakeChild, weight auto, 0.8 until measured), "
        "disk (NamedChild, weight 0.8, store off, min_tokens 512), "
        f"far (FakeChild, weight 2, load off, promote off); control file {switches}"
    ]


def test_what_is_by_default_is_not_named(lines):
    multi(child("a", weight=1.0))
    assert about_the_multi_connector(lines) == ["MultiConnector: a (FakeChild, weight 1)"]


def test_workers_do_not_say_it_again(lines):
    multi(child("a"), role=KVConnectorRole.WORKER)
    assert about_the_multi_connector(lines) == []
