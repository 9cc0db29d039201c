# SPDX-License-Identifier: Apache-2.0
"""Tables: with lines on a terminal, aligned text anywhere else."""

import sys
from collections.abc import Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Rows = Sequence[Sequence[str]]
_UNLIMITED = 10_000
"""Columns, where nobody looks: a line of text is never folded."""


def show_table(title: str, rows: Rows, *, has_header: bool = False) -> None:
    """Prints rows of equal length. ``has_header``: the first one names the columns."""
    is_terminal = sys.stdout.isatty()
    if title:
        print(title)
    table = Table(show_header=has_header, box=HEAVY_HEAD if is_terminal else None, pad_edge=is_terminal, padding=(0, 1))
    for name in rows[0]:
        table.add_column(Text(name) if has_header else "", overflow="fold")
    for row in rows[has_header:]:
        table.add_row(*map(Text, row))
    Console(width=None if is_terminal else _UNLIMITED).print(table)
