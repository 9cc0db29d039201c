# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def until(predicate: Callable[[], object], what: str = "the condition", deadline_s: float = 20.0) -> None:
    """Wait for something that other threads do; the deadline is for tests that fail."""
    end = time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.002)
