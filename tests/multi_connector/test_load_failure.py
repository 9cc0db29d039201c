# SPDX-License-Identifier: Apache-2.0
"""Whose word counts when a load fails, and what a real scheduler then does to the request."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.multi_connector.fakes import cache_config, child, vllm_config
from vllm_overlay.multi_connector import MultiConnector, children
from vllm_overlay.multi_connector.children import load_failure_policy


@pytest.fixture
def lines(monkeypatch):
    found = []
    monkeypatch.setattr(children.logger, "info", lambda message, *args: found.append(message % args))
    return found


def start(*children, **settings):
    config = vllm_config(*children, **settings)
    built = MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    return config.kv_transfer_config.kv_load_failure_policy, built


def failing(name):
    return {**child(name), "kv_load_failure_policy": "fail"}


@pytest.mark.parametrize(
    ("own", "at_top", "failing", "value", "word"),
    [
        (None, "fail", [], "recompute", "that is the default"),
        (None, "recompute", [], "recompute", "kv_load_failure_policy of --kv-transfer-config"),
        (None, "fail", ["a"], "fail", "connector a"),
        (None, "fail", ["a", "c"], "fail", "connector a, c"),
        (None, "recompute", ["a"], "recompute", "kv_load_failure_policy of --kv"),
        ("fail", "recompute", [], "fail", "load_failure_policy of the MultiConnector"),
        ("recompute", "fail", ["a"], "recompute", "load_failure_policy of the MultiConnector"),
    ],
)
def test_whose_word_counts(own, at_top, failing, value, word):
    policy = load_failure_policy(own, at_top, failing)
    assert policy.value == value
    assert policy.reason.startswith(word)


@pytest.mark.parametrize(
    ("children", "settings", "value"),
    [
        ([child("a"), child("b")], {}, "recompute"),
        ([child("a"), failing("b")], {}, "fail"),
        ([child("a"), failing("b")], {"load_failure_policy": "recompute"}, "recompute"),
        ([child("a"), child("b")], {"load_failure_policy": "fail"}, "fail"),
        ([child("a", load_failure_policy="fail")], {}, "recompute"),  # that setting is only known to be one of ours
    ],
)
def test_the_policy_is_the_engines_and_every_childs_and_is_logged_once(children, settings, value, lines):
    policy, built = start(*children, **settings)
    assert policy == value
    assert {one._kv_transfer_config.kv_load_failure_policy for one in built.sub_connectors} == {value}
    _, line = lines  # the first says which children there are
    assert line.startswith(f"kv_load_failure_policy is {value!r} for all connectors of the MultiConnector")


def test_a_worker_says_nothing_and_leaves_the_engines_configuration_alone(lines):
    config = vllm_config(child("a"))
    MultiConnector(config, KVConnectorRole.WORKER, cache_config())
    assert lines == [] and config.kv_transfer_config.kv_load_failure_policy == "fail"
    MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config())  # in one process, with one configuration
    _, line = lines
    assert "that is the default" in line


def test_what_a_child_makes_of_its_own_copy_of_the_configuration_counts_for_nothing():
    assert start(failing("a"), child("b", wants_recompute=True))[0] == "fail"
