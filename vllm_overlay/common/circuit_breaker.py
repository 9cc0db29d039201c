# SPDX-License-Identifier: Apache-2.0
"""Leaves alone what fails again and again, say a disk."""

import logging
import threading
import time

from vllm_overlay.common.backoff import Backoff

FAULTS_TO_OPEN = 16
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Opens after ``FAULTS_TO_OPEN`` faults in a row. After a pause it is half open: one attempt decides. Thread-safe.
    ``name`` says what it guards, for the log. Every attempt that ``allows`` let pass is followed by one ``report``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_faults = 0
        self._is_open = False
        self._is_half_open = False
        self._attempt_ends = 0.0
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def allows(self) -> bool:
        """Whether to try now."""
        with self._lock:
            if not self._is_open:
                return True
            now = time.monotonic()
            if self._pause_left_s(now):
                return False
            self._attempt_ends = now + self._backoff.pause_s  # one attempt a pause, also when it hangs
            self._is_half_open = True
            return True

    @property
    def is_open(self) -> bool:
        """Whether it has opened, and no attempt has succeeded since."""
        return self._is_open

    def pause_left_s(self) -> float:
        """Seconds until the next attempt may be made; 0.0 when one may be made now."""
        with self._lock:
            return self._pause_left_s(time.monotonic()) if self._is_open else 0.0

    def _pause_left_s(self, now: float) -> float:
        return max(self._backoff.remaining_s(now), self._attempt_ends - now, 0.0)

    def trip(self) -> None:
        """Opens at once, or for longer when an attempt was due: somebody has waited long enough."""
        with self._lock:
            if not self._is_open or self._is_half_open or not self._pause_left_s(time.monotonic()):
                self._num_faults += 1
                self._open()

    def report(self, is_fault: bool) -> None:
        """How an attempt ended. One that never reached the disk, or found a bad file, is no fault."""
        with self._lock:
            if is_fault:
                self._num_faults += 1
                if self._is_half_open or self._num_faults == FAULTS_TO_OPEN:
                    self._open()
            else:
                self._close()

    def _open(self) -> None:
        self._is_open, self._is_half_open = True, False
        self._backoff.failed(time.monotonic())
        self._attempt_ends = 0.0
        logger.warning(
            "%s failed %d times in a row; none for %.0f s", self._name, self._num_faults, self._backoff.pause_s
        )

    def _close(self) -> None:
        if self._is_open:
            logger.warning("%s work again", self._name)
            self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._num_faults, self._is_open, self._is_half_open, self._attempt_ends = 0, False, False, 0.0
