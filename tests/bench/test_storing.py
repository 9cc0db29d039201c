# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what storing costs, without an engine."""

import contextlib
import random
import time
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from bench import storing
from bench.step_cost import SIDES
from bench.storing import PROMPTS_AT_ONCE, Storing, main, of_a_start, rows


class FakeEngine:
    """Each round takes 10 s, of which the connector takes 2 s, and 8 s while tiers are filled. After it two steps are
    left to do. Without the connector it takes 8 s, and one step is left.

    It is its own engine core, its own scheduler and its own connector.
    """

    def __init__(self, evicts_in_round: int) -> None:
        self.now = 0.0
        self.rounds = 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=self))
        self.scheduler = self
        self.connector: FakeEngine | None = self
        self.requests: dict[str, object] = {}
        self.pending = self.left_over = 0
        self.full_in = evicts_in_round

    def get_metrics(self) -> list[SimpleNamespace]:
        evicted = max(0, self.rounds - self.full_in + 1)
        return [SimpleNamespace(name="vllm:hybrid_offload_evicted_objects", value=evicted)]

    def generate(self, *_: object, **__: object) -> None:
        self.left_over += self.pending
        self.rounds += 1
        self.schedule()
        if self.connector is not None:
            self.connector.build_connector_meta()
        self.pending = 1 if self.connector is None else 2

    def schedule(self) -> None:
        self.now += 2.0 if self.rounds <= self.full_in else 8.0

    def build_connector_meta(self) -> None:
        self.now += 8.0 if self.rounds <= self.full_in else 2.0

    def has_requests(self) -> bool:
        return self.pending > 0

    def step_fn(self) -> tuple[None, bool]:
        self.now += 100.0
        self.pending -= 1
        return None, False

    def post_step(self, _: bool) -> None:
        """Nothing."""

    def make_stats(self) -> None:
        """No report."""


def test_what_fills_the_tiers_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(evicts_in_round=10)
    for clock in ("thread_time", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: engine.now)
    monkeypatch.setattr(storing, "BOOKKEEPING_S", 0)
    asked = Storing(engine, num_tiers=1)
    engine.left_over = 0
    for number, connector_first in ((12, True), (14, False), (16, True)):
        found = asked.ask(connector_first)
        assert engine.rounds == number
        assert found["over"] == pytest.approx(10 / 8)
        assert found["scheduler"] == pytest.approx(1e3 * 2 / PROMPTS_AT_ONCE)
        assert found["share"] == pytest.approx(2 / 8)
        assert found["worker"] == 0
        assert not engine.has_requests() and not engine.left_over
        assert engine.connector is engine


def test_tiers_that_are_not_full_are_not_measured() -> None:
    with pytest.raises(RuntimeError, match="not all 1 tiers evict after 99 rounds"):
        Storing(FakeEngine(evicts_in_round=200), num_tiers=1)


def test_a_tier_that_does_not_report_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="not all 2 tiers evict after 99 rounds"):
        Storing(FakeEngine(evicts_in_round=1), num_tiers=2)


def test_a_row_has_the_median_of_all_starts() -> None:
    starts = [
        [{"scheduler": 1.0, "worker": 2.0, "share": 0.05, "over": over + n} for n, _ in enumerate(SIDES)]
        for over in (1.1, 1.3, 1.2, 1.9, 1.7, 1.8)
    ]
    assert list(rows(starts))[1] == (SIDES[1].name, "1.00", "2.00", "5.00%", "2.50 (2.10 to 2.90)")


def test_rounds_of_a_start_become_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(range(1000))
    side = SimpleNamespace(ask=lambda connector_first: {"over": float(next(answers)) + 100 * connector_first})
    monkeypatch.setattr(storing, "processes", lambda sides, program: contextlib.nullcontext([side]))
    # The first round does not count. Then 102 and 3, 104 and 5, 106 and 7.
    assert of_a_start(["program"], 3, random.Random(0)) == [{"over": (7 + 102) / 2}]


def test_an_engine_without_its_connector_has_neither_half(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SimpleNamespace(connector="scheduler's half")
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", "worker's half")
    with storing.without_connector(scheduler):
        assert scheduler.connector is None and not kv_transfer_state.has_kv_transfer_group()
    assert scheduler.connector == "scheduler's half" and kv_transfer_state.get_kv_transfer_group() == "worker's half"


def test_fewer_starts_than_an_interval_needs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--starts", "5"])
    assert "at least 6" in capsys.readouterr().err
