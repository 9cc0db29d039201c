# SPDX-License-Identifier: Apache-2.0
"""Leaves a disk alone that fails again and again."""

import logging
import threading
import time

FAULTS_TO_OPEN = 16
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
logger = logging.getLogger(__name__)


class Breaker:
    """Open after so many faults in a row; then, after a pause that doubles each time, one attempt decides. Thread-safe.

    ``name`` says what it guards. Every attempt that ``allows`` let pass is followed by one ``report``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_faults = 0
        self._pause_s = 0.0
        self._next_attempt = 0.0
        self._is_trying = False

    def allows(self) -> bool:
        """Whether to try now."""
        with self._lock:
            if not self._pause_s:
                return True
            now = time.monotonic()
            if now < self._next_attempt:
                return False
            self._next_attempt = now + self._pause_s  # one attempt a pause, also when it hangs
            self._is_trying = True
            return True

    def pause_left_s(self) -> float:
        """Seconds until the next attempt may be made; 0.0 when one may be made now."""
        with self._lock:
            return max(0.0, self._next_attempt - time.monotonic()) if self._pause_s else 0.0

    def trip(self) -> None:
        """Open at once, or for longer when an attempt was due: somebody has waited long enough."""
        with self._lock:
            if not self._pause_s or self._is_trying or time.monotonic() >= self._next_attempt:
                self._num_faults += 1
                self._open()

    def report(self, is_fault: bool) -> None:
        """How an attempt ended. One that never reached the disk, or found a bad file, is no fault."""
        with self._lock:
            if not is_fault:
                if self._pause_s:
                    logger.warning("disk tier: %s work again", self._name)
                self._num_faults, self._pause_s, self._is_trying = 0, 0.0, False
                return
            self._num_faults += 1
            if self._is_trying or self._num_faults == FAULTS_TO_OPEN:
                self._open()

    def _open(self) -> None:
        self._is_trying = False
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._next_attempt = time.monotonic() + self._pause_s
        logger.warning("disk tier: %d %s in a row failed; none for %.0f s", self._num_faults, self._name, self._pause_s)
