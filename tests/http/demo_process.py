# SPDX-License-Identifier: Apache-2.0
"""``tools/demo.py`` as a user runs it, watched from outside: its output, its processes, what it leaves."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.python_path import REPOSITORY
from tests.waiting import until
from tools.process_group import members, segments
from tools.server_process import hold_port, port_of


class DemoProcess:
    """A context manager; whatever is left at its end is killed."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._directory = directory
        self._temporary = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))  # short: the server keeps sockets in it
        self._holder = hold_port()
        self._port = port_of(self._holder)
        self._arguments = ["--directory", str(directory), "--port", str(self._port), *arguments]
        self._descendants: set[psutil.Process] = set()
        self._segments: set[Path] = set()
        self._ended = threading.Event()
        self.output = ""

    def __enter__(self) -> "DemoProcess":
        self._process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "tools" / "demo.py"), *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(self._temporary)},
            text=True,
            start_new_session=True,
        )
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._ended.set()
        self._watcher.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        for process in self.left_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._holder.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _watch(self) -> None:
        """Remembers every process that was ever seen below the demo, and the shared memory they mapped."""
        demo = psutil.Process(self._process.pid)
        while not self._ended.wait(0.1):
            try:
                self._descendants |= set(demo.children(recursive=True))
            except psutil.NoSuchProcess:
                return
            self._segments |= segments([process.pid for process in self._descendants])

    def lines(self) -> Iterator[str]:
        """What it prints, as it comes."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            yield line

    def wait_for(self, text: str) -> None:
        """Returns once a printed line holds ``text``."""
        if not any(text in line for line in self.lines()):
            raise AssertionError(f"{text!r} was not printed:\n{self.output}")

    def wait_for_processes(self, count: int) -> None:
        """Returns once so many were seen: the API server, multiprocessing's tracker, the engine, its worker."""

        def are_there() -> bool:
            assert self._process.poll() is None, self.output
            return len(self._descendants) >= count

        until(are_there, f"{count} processes below the demo")

    def send(self, number: signal.Signals) -> None:
        """To the demo alone: what it started is in a session of its own."""
        self._process.send_signal(number)

    def finish(self) -> int:
        """Its exit status."""
        for _ in self.lines():
            pass
        status = self._process.wait()
        self._ended.set()
        self._watcher.join()
        return status

    def left_processes(self) -> list[psutil.Process]:
        """Of all that were seen below it, and of their process groups, those that live."""
        groups = {process.pid for process in self._descendants}
        seen, found = set(self._descendants), []
        for pid in [pid for group in groups for pid in members(group)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.add(psutil.Process(pid))
        for process in seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left_files(self) -> list[Path]:
        """Temporary files, the run's own, and shared memory."""
        run = self._directory / "run"
        memory = [path for path in self._segments if path.exists()]
        return [*self._temporary.rglob("*"), *([run] if run.exists() else []), *memory]

    def assert_nothing_left(self) -> None:
        """No process, file or listening port."""
        assert self._descendants, "no process of the server was ever seen"
        assert self.left_processes() == []
        assert self.left_files() == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self._port)) != 0
