# SPDX-License-Identifier: Apache-2.0
"""Threads that may wait for a disk."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_log = RateLimitedLog(logging.getLogger(__name__))


class ThreadPool:
    """Threads that do jobs first in, first out. They are daemons, so one that a disk holds forever does not keep the
    process."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{place}", daemon=True) for place in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """End every thread after its jobs, and wait for their end no longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except SHUTDOWN:
                raise
            except BaseException as error:  # a job reports its own errors: this is a defect, but the thread lives on
                _log.warning("job", "disk tier: a job failed: %r", error)


def in_threads(job: Callable[[_Item], _Result], items: Sequence[_Item], num_threads: int) -> Iterator[_Result]:
    """What ``job`` returns for each item, as it comes. This thread and others work at it. Raises what a job has raised.

    The others are daemons that end with this call, so nobody has to stop them.
    """
    left = deque(items)
    results: queue.SimpleQueue[_Result | BaseException] = queue.SimpleQueue()

    def work() -> bool:
        try:
            item = left.popleft()
        except IndexError:
            return False
        try:
            results.put(job(item))
        except BaseException as error:
            results.put(error)
        return True

    def work_on() -> None:
        while work():
            pass

    for _ in range(min(num_threads, len(items)) - 1):
        threading.Thread(target=work_on, daemon=True).start()
    for _ in items:
        work()
        found = results.get()
        if isinstance(found, BaseException):
            left.clear()
            raise found
        yield found
