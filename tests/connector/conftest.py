# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the process, which the test moves."""
    seconds = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    return seconds
