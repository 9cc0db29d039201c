# SPDX-License-Identifier: Apache-2.0
"""What the report of a failed test shows of the engines that ran (tests/conftest.py)."""

import pytest

from tests.conftest import Judges
from tests.engine.bar import PLAIN
from tests.engine.client import EngineError
from tests.engine.states import FLOAT32


def test_it_has_what_answers_rest_on(judges: Judges) -> None:
    report = judges(FLOAT32, PLAIN).report
    for name in ("prefix_match_unit", "instructions", "l2_cache_bytes", "weights", "buffers"):
        assert name in report


@pytest.mark.parametrize("error", [EngineError("it has ended"), ValueError("a closed file")], ids=repr)
def test_an_engine_that_cannot_be_asked_does_not_hide_the_failure(
    judges: Judges, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = judges(FLOAT32, PLAIN)

    def call(_: str) -> None:
        raise error

    monkeypatch.setattr(engine, "call", call)
    assert str(error) in engine.report
