# SPDX-License-Identifier: Apache-2.0
"""The command that serves a plan: the flags that were asked for, and the transfer configuration."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

SHUTDOWN_TIMEOUT_S = 10
"""Time that pending stores get at SIGTERM. vLLM's default kills the worker at once."""


def transfer_config(children: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``--kv-transfer-config``: a MultiConnector over one HybridOffloadConnector for each tier's settings."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "vllm_overlay.multi_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "HybridOffloadConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": dict(child),
                }
                for child in children
            ]
        },
    }


def server_command(model: str, flags: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """The arguments, one by one. ``shlex.join`` makes a line of a shell of them."""
    return [
        *("python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--enable-prefix-caching", *flags),
        *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
        *("--kv-transfer-config", json.dumps(config)),
    ]


def shell_line(command: Sequence[str]) -> str:
    return shlex.join(command)
