# SPDX-License-Identifier: Apache-2.0
"""A server of our own as a context manager: started, waited for, drained, and cleaned up after."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from tools.process_group import ProcessGroup, uninterrupted
from vllm_overlay.server.api_client import ApiClient

TEARDOWN_TIMEOUT_S = 20.0
"""Beyond what vLLM gives to requests and pending stores, for its processes to end by themselves."""
_POLL_S = 0.2


class ServerError(RuntimeError):
    """The server did not come up, or is gone; the message ends with its log."""


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with hold_port() as holder:
        return port_of(holder)


def hold_port() -> socket.socket:
    """Takes a loopback port that nobody listens on, until the socket is closed.

    The system gives it to nobody who asks for any port; a server that is told its number can listen on it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers set it too, and so may share the port
    holder.bind(("127.0.0.1", 0))
    return holder


def port_of(holder: socket.socket) -> int:
    """Of what ``hold_port`` returned."""
    port: int = holder.getsockname()[1]
    return port


class ServerProcess:
    """``with ServerProcess(...) as api``: an ApiClient of a server that is up. On the way out the server is stopped.

    ``arguments`` are those of vLLM's server, which listens on loopback in development mode and says in each answer how
    much of a prompt was cached. ``environment`` comes on top of this process's. ``model`` is the name in requests; ""
    asks the server. ``shutdown_timeout_s`` is how long it may take after SIGTERM.
    """

    PROGRAM: ClassVar[Sequence[str]] = ("vllm.entrypoints.openai.api_server",)
    """The module that takes the arguments, and what it is told first."""
    GROUP: ClassVar[type[ProcessGroup]] = ProcessGroup
    """How it is started."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log_path: Path,
        model: str = "",
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
        shutdown_timeout_s: float = 60.0,
    ) -> None:
        self.log_path = log_path
        self._model = model
        self._holder = None if port else hold_port()
        self._port = port if self._holder is None else port_of(self._holder)
        self._start_timeout_s = start_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._command = [
            *(sys.executable, "-m", *self.PROGRAM),
            *arguments,
            *("--host", "127.0.0.1", "--port", str(self._port), "--enable-prompt-tokens-details"),
        ]
        self._environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **(environment or {}),
        }
        self.group: ProcessGroup | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> ApiClient:
        try:
            with uninterrupted():
                self.group = self.GROUP(self._command, self._environment, self.log_path)
            return self._wait_until_up(self.group)
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _wait_until_up(self, group: ProcessGroup) -> ApiClient:
        api = ApiClient(self.url, self._model)
        deadline = time.monotonic() + self._start_timeout_s
        while group.exit_code is None:
            if api.is_healthy():
                return api
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not up after {self._start_timeout_s:.0f} s:\n{group.log_tail()}")
            time.sleep(_POLL_S)
        raise ServerError(f"the server ended with status {group.exit_code} while it started:\n{group.log_tail()}")

    def stop(self) -> None:
        """SIGTERM; vLLM finishes requests and stores within its shutdown time. What is left after that is killed."""
        if self.group is None:
            return
        try:
            self.group.terminate()
            self.group.wait(self._shutdown_timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """No time for anybody; also removes what the server left. Called again, it does nothing."""
        if self.group is not None:
            self.group.kill()
        if self._holder is not None:
            self._holder.close()
