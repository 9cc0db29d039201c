# SPDX-License-Identifier: Apache-2.0
"""The worker's half while anything comes and ends in any order."""

import itertools
import random

import pytest

from tests.connector.driven_worker import LOAD_TIMEOUT_S, Made, load_jobs, store_jobs
from tests.connector.fake_stream import FlakyTier
from vllm_overlay.common.reasons import Reason


class Chaos:
    """Stores, loads, fetches and copies that come and end in any order, under a guard such as the connector's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, probability: float) -> None:
        self.luck = random.Random(seed)
        self.made = Made(monkeypatch, self.luck.choice([4, 16, 64]), self.luck.choice([2, 8, 64]))
        if probability:
            self.made.use(FlakyTier(self.made.num_units, self.luck, probability))
        self.stored: set[int] = set()
        self.loads: set[str] = set()
        self.finished: list[str] = []
        self._numbers = itertools.count(1)
        self._waiting: list[tuple[str, int]] = []

    def step(self) -> None:
        event, in_flight = self.luck.random(), self.made.stream.in_flight
        if event < 0.25:
            self._store()
        elif event < 0.4:
            self._load()
        elif event < 0.65 and self._waiting and self.made.tier.free:
            self._arrive()
        elif event < 0.95 and in_flight:
            error = RuntimeError("x") if self.luck.random() < 0.1 else None
            self.made.stream.end(self.luck.choice(in_flight), error)
        else:
            self.made.now += self.luck.choice([0.0, 1.0, LOAD_TIMEOUT_S + 1])
        self.end_step()

    def end_step(self) -> None:
        self.made.worker.advance()
        self.made.report()
        done, _ = self.made.worker.take_finished()
        for name in done:
            copying = [p.spans[0].block_id for copy in self.made.stream.submitted.values() for p in copy.placements]
            assert not any(block >> 8 == int(name[1:]) for block in copying), "reported with a copy under way"
        self.finished.extend(done)

    def _store(self) -> None:
        tickets = [next(self._numbers) for _ in range(self.luck.randint(1, 4))]
        try:
            self.made.store(*tickets)
        except RuntimeError:
            self.made.worker.fail_stores(store_jobs(*tickets), Reason.HOOK_ERROR)
        self.stored.update(tickets)

    def _load(self) -> None:
        number = next(self._numbers)
        load_id, blocks = f"r{number}#1", [(number << 8) + n for n in range(self.luck.randint(1, 3))]
        try:
            self.made.load(load_id, blocks)
        except RuntimeError:
            self.made.worker.fail_loads(load_jobs(load_id, blocks), (), Reason.HOOK_ERROR)
        self.loads.add(f"r{number}")
        self._waiting += [(load_id, n) for n in range(len(blocks))]

    def _arrive(self) -> None:
        load_id, position = self._waiting.pop(self.luck.randrange(len(self._waiting)))
        if self.made.tier.is_loading(load_id):
            failure = {"reason": Reason.IO_ERROR} if self.luck.random() < 0.2 else {}
            self.made.tier.arrive(load_id, position, b"content.", **failure)


@pytest.mark.parametrize("probability", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_ends_when_every_ticket_and_load_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, seed: int, probability: float
) -> None:
    chaos = Chaos(monkeypatch, seed, probability)
    for _ in range(120):
        chaos.step()
    chaos.made.now += LOAD_TIMEOUT_S + 1
    for _ in range(50):
        for handle in chaos.made.stream.in_flight:
            chaos.made.stream.end(handle)
        chaos.end_step()
    assert set(chaos.made.reports()) == chaos.stored
    assert sorted(chaos.finished) == sorted(chaos.loads)
    if not probability:  # else the tier has lost some of it
        assert chaos.made.all_is_free
