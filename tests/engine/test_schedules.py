# SPDX-License-Identifier: Apache-2.0
"""Hypothesis drives a real engine with both tiers, and shrinks a schedule with a wrong answer to the shortest one."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.engine.client import Engine, EngineError, prompt
from tests.engine.judge import Judge, counters_of, judge_of, small_engine
from tests.engine.states import FLOAT32
from tests.engine.workload import Kind, Request, Turn

pytestmark = [pytest.mark.engine, pytest.mark.engines]

_MAX_TOKENS = 4
DEFAULT_SCHEDULES = 20
"""Enough to restore and to evict in both tiers."""
_NUMBERS = itertools.count()
TEXTS = st.integers(0, 2)
"""Numbers of texts: prompts that begin with the same one share the beginning."""
ENDS = st.sampled_from([64, 128, 192, FLOAT32.block_size])
LENGTHS = st.builds(int.__add__, ENDS, st.integers(-1, 3))
"""In tokens, near the ends of match units, of which one ends a block too."""


class Schedule(RuleBasedStateMachine):
    """One example. Its salts are its own: the tiers are full of earlier examples, and it hits none of that."""

    earlier = Bundle("earlier")

    def __init__(self, engine: Engine, judge: Judge) -> None:
        super().__init__()
        self._engine = engine
        self._judge = judge
        self._salt = f"example {next(_NUMBERS)}"

    @initialize(target=earlier, text=TEXTS, length=LENGTHS)
    def first(self, text: int, length: int) -> Request:
        return self.new(text, length)

    @rule(target=earlier, text=TEXTS, length=LENGTHS)
    def new(self, text: int, length: int) -> Request:
        return self._alone(Kind.NEW, Request(prompt(length, text), _MAX_TOKENS, self._salt))

    @rule(target=earlier, request=earlier, text=TEXTS, length=LENGTHS)
    def extend(self, request: Request, text: int, length: int) -> Request:
        return self._alone(Kind.EXTEND, _grown(request, request.tokens, text, length))

    @rule(target=earlier, request=earlier, text=TEXTS, length=LENGTHS)
    def continue_(self, request: Request, text: int, length: int) -> Request:
        return self._alone(Kind.CONTINUE, _grown(request, request.tokens + request.answer, text, length))

    @rule(target=earlier, request=earlier, at=LENGTHS, text=TEXTS, length=LENGTHS)
    def diverge(self, request: Request, at: int, text: int, length: int) -> Request:
        return self._alone(Kind.DIVERGE, _grown(request, request.tokens[:at], text, length))

    @rule(target=earlier, request=earlier)
    def repeat(self, request: Request) -> Request:
        return self._alone(Kind.REPEAT, replace(request))

    @rule(target=earlier, request=earlier, salt=st.sampled_from(["one", "two"]))
    def salt(self, request: Request, salt: str) -> Request:
        return self._alone(Kind.SALT, replace(request, salt=f"{self._salt}, {salt}"))

    @rule(request=earlier, text=TEXTS, length=LENGTHS, num_steps=st.integers(1, 7))
    def abort(self, request: Request, text: int, length: int, num_steps: int) -> None:
        self._take(Turn(Kind.ABORT, [_grown(request, request.tokens, text, length)], num_steps))

    @rule(request=earlier, num_requests=st.integers(2, 6))
    def burst(self, request: Request, num_requests: int) -> None:
        """They share a beginning and end so near a block's end that decoding needs another block."""
        length = FLOAT32.block_size - 2
        requests = [_grown(request, request.tokens, text, length) for text in range(num_requests)]
        self._take(Turn(Kind.BURST, requests))

    @rule()
    def reset(self) -> None:
        self._take(Turn(Kind.RESET))

    def _alone(self, kind: Kind, request: Request) -> Request:
        self._take(Turn(kind, [request]))
        return request

    def _take(self, turn: Turn) -> None:
        """Stores end before the next turn: what that hits rests on the schedule alone."""
        try:
            wrong = self._judge.take(self._engine, turn)
            self._engine.wait_for_stores()
        except EngineError:
            self._engine.__exit__()
            self._engine.__enter__()  # the next example gets one that works
            raise
        assert wrong == []


def _grown(request: Request, start: list[int], text: int, length: int) -> Request:
    """``request`` with tokens that begin with ``start`` and go on with a text; one that is too long is cut."""
    return replace(request, tokens=(start + prompt(length, text))[:length])


def test_no_schedule_is_answered_otherwise_than_without_a_cache(tiny_model: Path, tmp_path: Path) -> None:
    """``SCHEDULES`` is how many it tries."""
    num_schedules = int(os.environ.get("SCHEDULES", DEFAULT_SCHEDULES))
    with (
        judge_of(tiny_model, FLOAT32) as judge,
        small_engine(tiny_model, FLOAT32, tmp_path, "8 MiB", "32 MiB") as engine,
    ):
        run_state_machine_as_test(
            lambda: Schedule(engine, judge), settings=settings(max_examples=num_schedules, stateful_step_count=12)
        )
        counters = counters_of(engine)
    happened = ("cpu: restored_tokens", "cpu: evicted_objects", "disk: restored_tokens", "disk: evicted_objects")
    if num_schedules >= DEFAULT_SCHEDULES:
        assert all(counters[one] for one in happened), counters
    assert counters["cpu: failed_loads"] == counters["disk: failed_loads"] == 0
