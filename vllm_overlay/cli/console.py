# SPDX-License-Identifier: Apache-2.0
"""What several commands print with: text without control characters, sizes, ages, tables, and a bar of progress."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from vllm_overlay.config import GIB, KIB, MIB, TIB

Rows = Sequence[Sequence[str]]
_UNLIMITED = 10_000
"""Columns, where nobody looks: a line of text is never folded."""


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


def show_table(title: str, rows: Rows, *, has_header: bool = False) -> None:
    """Prints rows of equal length, with lines on a terminal and as aligned text anywhere else.

    ``has_header``: the first row names the columns.
    """
    is_terminal = sys.stdout.isatty()
    if title:
        print(title)
    table = Table(show_header=has_header, box=HEAVY_HEAD if is_terminal else None, pad_edge=is_terminal, padding=(0, 1))
    for name in rows[0]:
        table.add_column(Text(name) if has_header else "", overflow="fold")
    for row in rows[has_header:]:
        table.add_row(*map(Text, row))
    console = Console(width=None if is_terminal else _UNLIMITED)
    with console.capture() as drawn:  # rich itself would end the process where nobody reads on
        console.print(table)
    print(drawn.get(), end="")


@contextlib.contextmanager
def progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """What to call with the bytes done and in total, as often as one likes.

    It shows a bar on standard error. Where that is no terminal it prints nothing.
    """
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(verb)
        yield lambda done, total: bar.update(task, completed=done, total=total)
