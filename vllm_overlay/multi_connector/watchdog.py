# SPDX-License-Identifier: Apache-2.0
"""Measures hooks, and names the child and the hook that an engine hangs in. It cannot end a hook.

A hook runs on the thread that called it, because a worker's current stream and inference mode are that thread's. So a
hook that never returns stops the engine whatever we do. What we can do is name the child.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable

from vllm.logger import init_logger

from vllm_overlay.common.fence import SHUTDOWN

logger = init_logger(f"vllm.{__name__}")


_Call = tuple[str, str, float, int]
"""Child, hook, when it began, and the thread that it is called on."""


class Watchdog:
    """One per MultiConnector. ``began`` and ``ended`` bracket each hook; they cost well under a microsecond."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: a call that lasts longer is reported. With 0 none is."""
        self.limit_s = limit_s
        self._clock = clock
        self._call: _Call | None = None
        self._reported: _Call | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def began(self, child: str, hook: str) -> None:
        """A child's hook is about to be called on this thread."""
        self._call = child, hook, self._clock(), threading.get_ident()
        if self._thread is None and self.limit_s > 0:
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="multi-connector-watchdog", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads; how long hooks take is still measured
            logger.error("The watchdog has no thread, so hooks that hang are not named: %s", error)

    def ended(self) -> float:
        """Called when the hook has returned. Returns how many seconds it took."""
        call, self._call = self._call, None
        return 0.0 if call is None else self._clock() - call[2]

    def is_hang(self, seconds: float) -> bool:
        """Whether a hook that took so long is one that hung."""
        return 0 < self.limit_s < seconds

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self.limit_s / 4):
            self.look()

    def look(self) -> None:
        """Reports the present call once if it has lasted too long."""
        call = self._call
        if call is None or call is self._reported:
            return
        child, hook, started, thread_id = call
        if self._clock() - started <= self.limit_s:
            return
        self._reported = call
        logger.error(
            "Connector %r has not returned from %s for %.1f s (hang_after_s). The engine waits for it here:\n%s",
            child,
            hook,
            self._clock() - started,
            _stack_of(thread_id),
        )


def _stack_of(thread_id: int) -> str:
    """Where a thread is now. Reading its frames and their sources may fail while it runs on."""
    try:
        frame = sys._current_frames().get(thread_id)
        return "".join(traceback.format_stack(frame)[-12:]) if frame is not None else "(its thread is gone)"
    except SHUTDOWN:
        raise
    except BaseException as error:
        return f"(its stack cannot be read: {error!r})"
