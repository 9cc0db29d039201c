# SPDX-License-Identifier: Apache-2.0
"""The server of the demo and the tests: a tiny model, match unit 64."""

import getpass
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.server_process import TEARDOWN_TIMEOUT_S, ServerProcess

SHUTDOWN_TIMEOUT_S = 10
"""vLLM's own: what it gives to requests and pending stores after SIGTERM."""
MODEL_NAME = "tiny"
KV_CACHE_BYTES = 256 << 20
"""Of the device. vLLM writes zeros to all of it at the start, so a gigabyte takes seconds."""


class Server(ServerProcess):
    """``arguments`` and ``environment`` come on top of what is set here.

    Without ``kv_transfer_config`` it serves without a connector.
    """

    def __init__(
        self,
        model: Path,
        kv_transfer_config: Mapping[str, Any] | None,
        *,
        log_path: Path,
        port: int | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        flags = [
            *("--model", str(model), "--served-model-name", MODEL_NAME),
            *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
            *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *("--prefix-match-unit", "64", "--enable-prefix-caching", "--enforce-eager"),
            *("--disable-access-log-for-endpoints", "/health,/metrics"),
        ]
        if kv_transfer_config is not None:
            flags += ["--kv-transfer-config", json.dumps(kv_transfer_config)]
        super().__init__(
            [*flags, *arguments],
            log_path=log_path,
            model=MODEL_NAME,
            port=port,
            environment={
                # The server gets a TMPDIR of its own; what torch compiles for the first request should outlive it.
                "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", _torch_cache()),
                **(environment or {}),
            },
            shutdown_timeout_s=SHUTDOWN_TIMEOUT_S + TEARDOWN_TIMEOUT_S,
        )


def _torch_cache() -> str:
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
