# SPDX-License-Identifier: Apache-2.0
"""A command with everything it starts, ended together: no process, shared memory or scratch file outlives it. Linux."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

SHARED_MEMORY = Path("/dev/shm")
_SEGMENT_PREFIXES = ("psm_", "sem.mp-", "vllm_dist_", "vllm_offload_")
"""What multiprocessing and vLLM make there; the rest of a name is random, so a mapped one is its group's own."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a supervisor, a terminal that is closed."""

KILL_TIMEOUT_S = 10.0
"""For the kernel to end killed processes; more means that one hangs in a system call."""
_POLL_S = 0.05
_LONGEST_SCRATCH = 107 - len("/" + str(uuid.uuid4()))
"""A socket's path has at most 107 characters, and vLLM names its sockets so."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """ENDING_SIGNALS that arrive within take effect at its end. Only the main thread gets them; elsewhere nothing has
    to be held."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


def members(group: int) -> list[int]:
    """The living processes of a process group; one that is dead and not waited for does not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # "pid (name) state parent group ...", and a name may hold anything.
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state not in "ZX":
                    found.append(int(entry.name))
    return found


def segments(pids: Sequence[int]) -> set[Path]:
    """The segments of shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SHARED_MEMORY and path.name.startswith(_SEGMENT_PREFIXES):
                    found.add(path)
    return found


class Leader(Protocol):
    """What a ProcessGroup asks of its command's process, as of ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self) -> int: ...


class ProcessGroup:
    """One command in a session of its own, so that a terminal's Ctrl-C reaches it only through ``stop``.

    ``scratch`` is its TMPDIR: an empty directory with a short path (sockets go there), removed at the end.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self._segments: set[Path] = set()
        self._is_over = False
        self.log_path = log_path
        with uninterrupted():
            self.scratch = _make_scratch()
            try:
                self._process = self._start(command, {**environment, "TMPDIR": str(self.scratch)})
            except BaseException:
                shutil.rmtree(self.scratch, ignore_errors=True)
                raise
            atexit.register(self.kill)

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> "Leader":
        """The command, in a session of its own."""
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Of the command itself; None while it runs."""
        return self._process.poll()

    @property
    def pids(self) -> list[int]:
        """Of all its processes that live."""
        return members(self._process.pid)

    def log_tail(self, num_lines: int = 30) -> str:
        """The end of what it has printed."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-num_lines:])

    def terminate(self) -> None:
        """SIGTERM to the command; what it started hears of it from the command."""
        self._segments |= segments(members(self._process.pid))
        self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Whether the whole group ended in that time."""
        return _wait_for(lambda: self._process.poll() is not None and not members(self._process.pid), timeout_s)

    def kill(self) -> None:
        """End what is left and remove what it leaves. Runs to its end; called again, it does nothing."""
        with uninterrupted():
            if self._is_over:
                return
            group = self._process.pid
            self._segments |= segments(members(group))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._process.wait()
            _wait_for(lambda: not members(group), KILL_TIMEOUT_S)
            for segment in self._segments:
                segment.unlink(missing_ok=True)
            shutil.rmtree(self.scratch, ignore_errors=True)
            self._is_over = True
            atexit.unregister(self.kill)


def _make_scratch() -> Path:
    """In TMPDIR, or in /tmp when that is too deep for a socket."""
    is_deep = len(os.path.join(tempfile.gettempdir(), "vllm-" + "x" * 8)) > _LONGEST_SCRATCH
    return Path(tempfile.mkdtemp(prefix="vllm-", dir="/tmp" if is_deep else None))


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
