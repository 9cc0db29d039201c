# SPDX-License-Identifier: Apache-2.0
"""Warnings that a failing disk cannot turn into a flood."""

import logging
import threading
import time

INTERVAL_S = 60.0


class RateLimitedLog:
    """At most one warning per topic and minute; the next one says how many were left out. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}

    def warning(self, topic: str, message: str, *args: object) -> None:
        """``topic`` comes from a fixed set, such as a reason label."""
        now = time.monotonic()
        with self._lock:
            last, left_out = self._last.get(topic, (-INTERVAL_S, 0))
            if now - last < INTERVAL_S:
                self._last[topic] = (last, left_out + 1)
                return
            self._last[topic] = (now, 0)
        more = f" ({left_out} more like this since)" if left_out else ""
        self._logger.warning(message + "%s", *args, more)
