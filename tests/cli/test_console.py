# SPDX-License-Identifier: Apache-2.0
"""What several commands print with."""

import contextlib
import io
import os
import sys
import time

import pytest

from vllm_overlay.cli.console import age, progress, show_table, shown, size

CURSOR_SHOWN = "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_names_cannot_steer_the_terminal():
    assert shown("a\x1b[2J\u202eb\n") == "a\\x1b[2J\\u202eb\\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_for_people(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (86400 * 2, "2 days")]
)
def test_ages_are_for_people(monkeypatch, seconds, text):
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    assert age(1_000_000.0 - seconds) == text


def test_a_table_into_a_closed_pipe_is_no_status_of_its_own(monkeypatch):
    """A command says by 1 that something is wrong."""
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError):
            show_table("", [("root",)])
            pipe.flush()


def test_progress_is_a_bar_on_a_terminal_and_gives_the_cursor_back(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with contextlib.suppress(KeyboardInterrupt), progress("reading") as show:
        show(1 << 20, 2 << 20)
        raise KeyboardInterrupt
    assert "reading" in terminal.getvalue() and "1.0/2.0 MiB" in terminal.getvalue()
    assert terminal.getvalue().rindex(CURSOR_SHOWN) > terminal.getvalue().rindex("reading")


def test_progress_is_silent_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("reading") as show:
        show(1, 1)
    assert sys.stderr.getvalue() == ""
