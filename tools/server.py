# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server as a context manager: started, waited for, drained, and cleaned up after."""

import getpass
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tools.api_client import ApiClient
from tools.process_group import ProcessGroup, uninterrupted

START_TIMEOUT_S = 300.0
SHUTDOWN_TIMEOUT_S = 10
"""vLLM's own: what it gives to requests and pending stores after SIGTERM."""
TEARDOWN_TIMEOUT_S = 20.0
"""Beyond that, for its processes to end by themselves."""
MODEL_NAME = "tiny"
_POLL_S = 0.2


class ServerError(RuntimeError):
    """The server did not come up, or is gone; the message ends with its log."""


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """``with Server(...) as api``: an ApiClient of a server that is up. On the way out the server is stopped.

    ``arguments`` and ``environment`` come on top of what is set here. Without ``kv_transfer_config`` it serves without
    a connector.
    """

    def __init__(
        self,
        model: Path,
        kv_transfer_config: Mapping[str, Any] | None,
        *,
        log_path: Path,
        port: int | None = None,
        kv_cache_gib: int = 1,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        self._port = port or free_port()
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
            *("--prefix-match-unit", "64", "--enable-prefix-caching", "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", "/health,/metrics"),
        ]
        if kv_transfer_config is not None:
            self._command += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
        self._command += arguments
        self._environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            # The server gets a TMPDIR of its own; what torch compiles for the first request should outlive it.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", _torch_cache()),
            **(environment or {}),
        }
        self.group: ProcessGroup | None = None

    def __enter__(self) -> ApiClient:
        try:
            with uninterrupted():
                self.group = ProcessGroup(self._command, self._environment, self.log_path)
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
        api = ApiClient(self._port, MODEL_NAME)
        deadline = time.monotonic() + START_TIMEOUT_S
        while group.exit_code is None:
            if api.is_healthy():
                return api
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not up after {START_TIMEOUT_S:.0f} s:\n{group.log_tail()}")
            time.sleep(_POLL_S)
        raise ServerError(f"the server ended with status {group.exit_code} while it started:\n{group.log_tail()}")

    def stop(self) -> None:
        """SIGTERM; vLLM finishes requests and stores within its shutdown time. What is left after that is killed."""
        if self.group is None:
            return
        try:
            self.group.terminate()
            self.group.wait(SHUTDOWN_TIMEOUT_S + TEARDOWN_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """No time for anybody; also removes what the server left. Called again, it does nothing."""
        if self.group is not None:
            self.group.kill()


def _torch_cache() -> str:
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
