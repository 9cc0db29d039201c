# SPDX-License-Identifier: Apache-2.0
"""Requests that come when they come: what is counted of each, and what a failure or an interruption does."""

import threading
from types import SimpleNamespace

import pytest

from bench import http_load
from bench.http_load import play
from bench.scaled_trace import ScaledRequest
from tests.waiting import until
from vllm_overlay.server.api_client import ApiError, Completion


class Api:
    """Answers at once, and says that the first token took a minute. Prompts of one token fail."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    def complete(self, prompt, max_tokens):
        self.prompts.append(prompt)
        if len(prompt) == 1:
            raise ApiError("no")
        return Completion([5] * max_tokens, [0.0] * max_tokens, len(prompt), len(prompt) - 1, 60.0)


def asked(*prompt: int, at: float = 0.0) -> ScaledRequest:
    return ScaledRequest(at, prompt, 3)


def test_all_are_sent_in_their_order_and_counted(monkeypatch):
    api, answered = Api(), []
    now, pauses = 100.0, []

    def sleep(seconds):
        nonlocal now
        until(lambda: len(answered) == len(pauses), "the answers to what was sent before")
        pauses.append(seconds)
        now += seconds

    monkeypatch.setattr(http_load, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    part = play(api, [asked(1, 2), asked(3, 4, 5, at=0.25)], lambda: answered.append(1))
    assert pauses == [0.0, 0.25]
    assert api.prompts == [(1, 2), (3, 4, 5)] and len(answered) == 2
    assert [(one.prompt_tokens, one.cached_tokens, one.answer_tokens) for one in part.served] == [(2, 1, 3), (3, 2, 3)]
    assert part.num_tokens == 2 + 3 + 3 + 3 and part.errors == ()
    assert [one.ended_s for one in part.served][1] == part.seconds == 0.25


def test_the_first_token_counts_from_when_the_request_was_due():
    """What came too late to be sent in time has waited: here it was due an hour ago."""
    (late,) = play(Api(), [asked(1, 2, at=-3600.0)]).served
    assert late.first_token_s >= 3660


def test_a_failed_request_is_counted_and_the_others_go_on():
    part = play(Api(), [asked(1), asked(1, 2)])
    assert part.errors == ("ApiError: no",) and len(part.served) == 1


def test_an_interruption_does_not_wait_for_answers():
    release = threading.Event()

    class Waiting(Api):
        def complete(self, prompt, max_tokens):
            release.wait()
            return super().complete(prompt, max_tokens)

    def interrupted():
        yield asked(1, 2)
        raise KeyboardInterrupt

    class Requests(list):
        __iter__ = lambda self: interrupted()  # noqa: E731

    api = Waiting()
    try:
        with pytest.raises(KeyboardInterrupt):
            play(api, Requests([1, 2]))
        assert api.prompts == []  # still waiting
    finally:
        release.set()
