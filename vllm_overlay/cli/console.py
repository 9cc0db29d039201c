# SPDX-License-Identifier: Apache-2.0
"""What several commands print with: text without control characters, sizes, ages, and a line of progress."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from vllm_overlay.config import GIB, KIB, MIB, TIB

_TICK_S = 0.2


def shown(text: str) -> str:
    """``text`` without anything that could steer a terminal: names of files are anybody's."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def size(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def age(then: float) -> str:
    """The time since ``then``, seconds since the epoch, for people."""
    seconds = max(0.0, time.time() - then)
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"


def progress(verb: str) -> Callable[[int, int], None]:
    """What to call with the bytes done and in total, as often as one likes.

    It writes over one line of standard error. Where that is no terminal it prints nothing.
    """
    if not sys.stderr.isatty():
        return lambda done, total: None
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _TICK_S and done < total:
            return
        last = now
        part = min(1.0, done / total) if total else 1.0
        bar = "#" * round(part * 20)
        speed = size(int(done / max(now - started, 1e-3)))
        end = "\n" if done >= total else ""
        print(f"\r{verb} [{bar:<20}] {part:4.0%} of {size(total)}, {speed}/s\x1b[K", end=end, file=sys.stderr)

    return show


@contextlib.contextmanager
def log_shown() -> Iterator[None]:
    """Meanwhile what the package logs, say the progress of a rebuild, goes to standard error."""
    log = logging.getLogger("vllm_overlay")
    handler, level = logging.StreamHandler(sys.stderr), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
