# SPDX-License-Identifier: Apache-2.0
"""What tests of the disk tier share."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_overlay.common import rate_limited_log


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Callable[..., list[str]]:
    """What was logged in these words about this test's own files, however often it was said before. A thread of an
    earlier test may still have something to say about others, and an earlier test may have let less be heard."""
    monkeypatch.setattr(rate_limited_log, "INTERVAL_S", 0.0)

    def said(words: str = "", level: int = logging.WARNING) -> list[str]:
        heard = [record.getMessage() for record in caplog.records if record.levelno >= level]
        return [message for message in heard if words in message and str(tmp_path) in message]

    return said
