# SPDX-License-Identifier: Apache-2.0
"""Tables: with lines on a terminal that has rich, aligned text anywhere else."""

import sys
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def show_table(title: str, rows: Rows, *, has_header: bool = False) -> None:
    """Prints rows of equal length. ``has_header``: the first one names the columns."""
    if sys.stdout.isatty() and _show_rich_table(title, rows, has_header):
        return
    if title:
        print(title)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _show_rich_table(title: str, rows: Rows, has_header: bool) -> bool:
    """Whether it was printed. rich comes with vLLM, but this package does not need it."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(title=title or None, show_header=has_header, title_justify="left")
    for name in rows[0]:
        table.add_column(Text(name) if has_header else "", overflow="fold")
    for row in rows[has_header:]:
        table.add_row(*map(Text, row))
    Console().print(table)
    return True
