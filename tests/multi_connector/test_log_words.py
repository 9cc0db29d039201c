# SPDX-License-Identifier: Apache-2.0
"""vLLM's log line: a few words on each child that did something, in place of all that was counted."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from tests.multi_connector.fakes import child, vllm_config
from vllm_overlay.common.reasons import Reason
from vllm_overlay.metrics import HOOK, MULTI_CONNECTOR, REASON, Kind
from vllm_overlay.multi_connector import MultiConnector
from vllm_overlay.multi_connector.hooks import HOOKS
from vllm_overlay.multi_connector.lifecycle import Phase
from vllm_overlay.multi_connector.stats import MOST_WORDS
from vllm_overlay.tally import Tally

CLASS = {"a": "tests.multi_connector.fakes:FakeChild", "b": "tests.multi_connector.fakes:FakeChild"}


def payload(tallies, **children):
    """Of a step: our tallies by child, and the children's own stats."""
    return {"*": {"tallies": {name: tally.to_dict() for name, tally in tallies.items()}, "classes": CLASS}, **children}


def logged(*payloads):
    """The lines of one interval."""
    logging = KVConnectorLogging(vllm_config(child("a"), child("b")).kv_transfer_config)
    for one in payloads:
        logging.observe(one)
    lines = []
    logging.log(log_fn=lambda message, *args: lines.append(message % args))
    return lines


def loading(tokens, *seconds):
    tally = Tally({"queries": 1, "asked_tokens": 8000, "offered_tokens": tokens, "chosen": 1, "loaded_tokens": tokens})
    for one in seconds:
        tally.observe("load_seconds", one)
    return tally


def test_a_line_says_what_each_child_had_and_loaded_and_what_failed():
    bad = Tally(
        {"failed_loads": 1, "errors:take_events": 2, "hangs": 1}, gauges={"state": 2, "quarantined_requests": 5}
    )
    bad.count("ignored_offer_tokens", 64, Reason.LOAD_OFF)
    assert logged(payload({"a": loading(4000, 0.25, 0.5), "b": bad}), payload({"a": loading(1000, 0.25)})) == [
        "KV Transfer metrics: a={'hit': '31.2% of 16000 tokens', 'loaded': '5000 tokens in 1.000 s'}, "
        "b={'ignored tokens': 64, 'failed loads': 1, 'exceptions': 2, 'hangs': 1, 'state': 'open'}"
    ]


def test_a_synchronous_load_has_no_seconds():
    assert MultiConnector.build_kv_connector_stats(payload({"a": loading(16)})).reduce()["a"]["loaded"] == "16 tokens"


def test_an_interval_without_requests_has_no_line():
    idle = Tally({"hook_seconds:wait_for_save": 0.5}, gauges={"state": 0})
    assert logged(payload({"a": idle, "b": idle})) == []


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.SERVING])
def test_a_child_out_of_service_is_in_every_line(phase):
    stats = MultiConnector.build_kv_connector_stats(payload({"a": Tally(gauges={"state": phase.value})}))
    assert stats.reduce() == {"a": {"state": phase.name.lower().replace("_", " ")}}


def test_a_childs_own_words_come_after_ours():
    stats = MultiConnector.build_kv_connector_stats(payload({"a": loading(800)}, a={"loads": 3}, b={"loads": 4}))
    assert list(stats.reduce()["a"].items())[-1] == ("loads", 3)
    assert stats.reduce()["b"] == {"loads": 4}


def test_a_child_with_much_to_say_does_not_make_a_long_line(monkeypatch):
    from tests.multi_connector.fakes import FakeStats

    monkeypatch.setattr(FakeStats, "reduce", lambda self: {f"word {number}": number for number in range(1000)})
    words = MultiConnector.build_kv_connector_stats(payload({"a": loading(800)}, a={"loads": 3})).reduce()["a"]
    assert len(words) == 2 + MOST_WORDS


def test_a_line_is_short_whatever_was_counted():
    many = Tally(gauges={"state": 3, "quarantined_requests": 10**6})
    for field, metric in MULTI_CONNECTOR.items():
        if metric.kind is Kind.COUNTER:
            labels = HOOKS if HOOK in metric.labels else Reason if REASON in metric.labels else [""]
            for label in labels:
                many.count(field, 10**9, label)
    (line,) = logged(payload({"a": many}))
    assert len(line) < 300
