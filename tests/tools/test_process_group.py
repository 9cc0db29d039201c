# SPDX-License-Identifier: Apache-2.0
"""A group is ended with everything it started and leaves nothing."""

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, until
from tools.process_group import SHARED_MEMORY, ProcessGroup, members, uninterrupted

STUBBORN = """
    import multiprocessing.shared_memory, signal, subprocess, sys, tempfile, time
    # Without a resource tracker nobody removes the segment: so does a killed engine.
    segment = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    child = subprocess.Popen(
        [sys.executable, "-c",
         "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
         "time.sleep(600)"],
    )
    tempfile.NamedTemporaryFile(delete=False)
    print(segment.name, flush=True)
    time.sleep(600)
"""
OBEDIENT = "import time; print('ready', flush=True); time.sleep(600)"


def start(tmp_path: Path, program: str, *words: str) -> ProcessGroup:
    """The group, once it has printed ``words``."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    group = ProcessGroup(command, os.environ, tmp_path / "log")

    def has_printed_them() -> bool:
        has_ended = group.exit_code is not None
        if all(word in group.log_path.read_text() for word in words):
            return True
        assert not has_ended, group.log_tail()
        return False

    until(has_printed_them, f"the words {words}")
    return group


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[ProcessGroup]:
    group = start(tmp_path, STUBBORN, "psm_", "deaf")
    yield group
    group.kill()


def leader_of(group: ProcessGroup) -> int:
    return group._process.pid


def test_kill_ends_children_that_are_deaf_and_removes_memory_and_scratch(stubborn: ProcessGroup) -> None:
    segment = next(SHARED_MEMORY / word for word in stubborn.log_path.read_text().split() if word.startswith("psm_"))
    assert segment.exists()
    assert len(members(leader_of(stubborn))) >= 2
    assert any(stubborn.scratch.iterdir())
    stubborn.kill()
    assert members(leader_of(stubborn)) == []
    assert not segment.exists()
    assert not stubborn.scratch.exists()


def test_a_group_has_ended_when_its_last_process_has(stubborn: ProcessGroup) -> None:
    stubborn.terminate()
    until(lambda: stubborn.exit_code is not None, "the leader's end")
    assert not stubborn.wait(0.1)
    assert stubborn.exit_code == -signal.SIGTERM
    assert members(leader_of(stubborn))


def test_a_group_that_obeys_ends_with_sigterm(tmp_path: Path) -> None:
    group = start(tmp_path, OBEDIENT, "ready")
    group.terminate()
    assert group.wait(PATIENCE_S)
    group.kill()
    assert not group.scratch.exists()


def test_a_second_kill_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = start(tmp_path, OBEDIENT, "ready")
    group.kill()
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("its number may be another group's by now"))
    group.kill()


def test_ctrl_c_waits_until_the_block_is_over_and_is_not_lost() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            steps.append("after the signal")
        steps.append("after the block")
    assert steps == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_command_that_cannot_start_leaves_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        ProcessGroup([str(tmp_path / "no-such-program")], os.environ, tmp_path / "log")
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


def test_the_scratch_is_never_too_deep_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    group = start(tmp_path, OBEDIENT, "ready")
    group.kill()
    assert len(str(group.scratch)) < 70
