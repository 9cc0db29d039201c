# SPDX-License-Identifier: Apache-2.0
"""Isolations are incidents: one each time a child leaves service, however many processes it fails in."""

import pytest

from tests.multi_connector.lockstep import Returning


class Incidents(Returning):
    """Adds up what all processes report of the first child, as vLLM's front end does."""

    def __init__(self, ranks):
        super().__init__(ranks=ranks)
        self.isolations = self.returns = 0

    def step(self):
        output = super().step()
        for stats in (output.kv_connector_stats, self.scheduler.get_kv_connector_stats()):
            if stats is not None and (found := stats.data["*"].tallies.get("a")):
                self.isolations += found.total("isolations")
                self.returns += found.total("returns")
        return output

    def break_on(self, *fakes, hook="start_load_kv"):
        for fake in fakes:
            fake.raising = {hook}

    @property
    def missing(self):
        """How many children are out, as the tallies say it."""
        return self.isolations - self.returns


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_failure_in_every_process_is_one_isolation(ranks):
    engine = Incidents(ranks)
    engine.break_on(*engine.fakes(0)[1:])
    engine.break_on(engine.fakes(0)[0], hook="update_connector_output")
    for _ in range(4):
        engine.step()
    assert (engine.isolations, engine.returns, engine.missing) == (1, 0, 1)
    assert engine.recover()
    engine.step()
    assert (engine.isolations, engine.returns, engine.missing) == (1, 1, 0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["scheduler", "worker"])
def test_an_attempt_to_come_back_that_fails_is_no_new_isolation(where, ranks):
    engine = Incidents(ranks)
    engine.break_on(engine.fakes(0)[0], hook="build_connector_meta")
    engine.step()
    side = engine.scheduler if where == "scheduler" else engine.workers[-1]
    build = side._children[0]._build
    side._children[0]._build = lambda: 1 / 0
    for _ in range(3):
        assert not engine.recover(steps=4)
        assert (engine.isolations, engine.returns) == (1, 0)
    side._children[0]._build = build
    assert engine.recover(steps=6) or engine.recover(steps=6)
    engine.step()
    assert (engine.isolations, engine.returns) == (1, 1)


def test_an_instance_that_fails_as_it_is_let_in_again_is_no_new_isolation():
    engine = Incidents(1)
    engine.break_on(engine.fakes(0)[0], hook="build_connector_meta")
    engine.step()
    child = engine.scheduler._children[0]
    build = child._build

    def building():
        fake = build()
        fake.raising = {"reset_cache"}
        return fake

    child._build = building
    assert not engine.recover()
    assert (engine.isolations, engine.returns) == (1, 0)


def test_each_further_failure_in_service_is_an_isolation():
    engine = Incidents(1)
    for number in range(1, 4):
        engine.break_on(engine.fakes(0)[1])
        engine.step()
        engine.step()
        assert (engine.isolations, engine.missing) == (number, 1)
        assert engine.recover()
        engine.step()
        assert (engine.returns, engine.missing) == (number, 0)


def test_a_child_out_of_service_is_in_every_report_and_its_return_in_one():
    engine, states = Incidents(1), []
    original = engine.scheduler.get_kv_connector_stats

    def collecting():
        stats = original()
        found = stats.data["*"].tallies.get("a") if stats else None
        states.append(found.gauges.get("state") if found else None)
        return stats

    engine.scheduler.get_kv_connector_stats = collecting
    engine.step()
    engine.break_on(engine.fakes(0)[0], hook="build_connector_meta")
    for _ in range(4):
        engine.step()
    assert states == [None, 2, 2, 2, 2]
    assert engine.recover()
    engine.step()
    assert [state for state in states[5:] if state != 3] == [0, None]
