# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay plan``: what a server will have, before it is started, and the command that starts it."""

import argparse
import dataclasses
import json
from typing import Any, get_args

import msgspec

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.plan_view import show_plan
from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import GeometryError
from vllm_overlay.planning.capacity import Conversation
from vllm_overlay.planning.plan import Plan, make_plan
from vllm_overlay.planning.question import FLAGS, Platform, Question
from vllm_overlay.planning.server_command import shell_line


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
Reads the model's config.json. It needs no weights, no network and no device. On a machine with vLLM it asks vLLM
itself, in a quarter to half a minute. For --platform cuda, or without vLLM, it uses vLLM's rule, and says so.

example:
  vllm-overlay plan /models/Qwen3.5-35B-A3B --cpu 32GiB --disk /mnt/kv:1TiB --conversation-tokens 8000
"""
    parser.add_argument("model", metavar="MODEL", help="a directory, or a name in transformers' local cache")
    parser.add_argument("--cpu", metavar="SIZE", help='capacity of a CPU tier, such as "32 GiB" (all ranks together)')
    parser.add_argument("--disk", metavar="ROOT:SIZE", help="root and capacity of a disk tier, such as /mnt/kv:1TiB")
    parser.add_argument("--platform", choices=get_args(Platform), default="cpu", help="default: %(default)s")
    server = parser.add_argument_group("flags of vLLM's server, which the command will have too")
    for name in ("block_size", "max_model_len", "tensor_parallel_size", "prefix_match_unit", "max_num_batched_tokens"):
        server.add_argument(_flag(name), type=int, metavar="N")
    server.add_argument("--prefix-cache-retention-interval", type=int, metavar="N")
    server.add_argument("--kv-cache-dtype", metavar="DTYPE")
    server.add_argument("--mamba-ssm-cache-dtype", metavar="DTYPE", help="of recurrent states")
    server.add_argument("--prefix-caching-hash-algo", metavar="NAME")
    parser.add_argument(
        "--conversation-tokens",
        type=int,
        default=8000,
        metavar="N",
        help="length of the conversations to count (default: %(default)s)",
    )
    parser.add_argument(
        "--turns", type=int, default=1, metavar="N", help="of each; each leaves a snapshot (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _run(arguments: argparse.Namespace) -> int:
    if arguments.conversation_tokens < 1 or arguments.turns < 1:
        raise ConfigError("--conversation-tokens and --turns must be at least 1, such as 8000 and 1")
    question = Question(
        model=arguments.model, platform=arguments.platform, **{name: getattr(arguments, name) for name in FLAGS}
    )
    interval = question.prefix_cache_retention_interval or 0
    conversation = Conversation(arguments.conversation_tokens, arguments.turns, interval)
    try:
        plan = make_plan(question, _children(arguments), conversation)
    except GeometryError as error:
        raise ConfigError(str(error)) from error
    if arguments.json:
        print(json.dumps(_plain(plan), indent=2))
    else:
        show_plan(plan)
    return PROBLEMS if plan.has_warnings else SOUND


def _children(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The settings of each tier, the CPU's first."""
    children: list[dict[str, Any]] = []
    if arguments.cpu:
        children.append({"tier": "cpu", "capacity_bytes": arguments.cpu})
    if arguments.disk:
        root, _, capacity = arguments.disk.rpartition(":")
        if not root:
            raise ConfigError(f"--disk {arguments.disk!r} must be a root and a size, such as /mnt/kv:1TiB")
        children.append({"tier": "disk", "root": root, "capacity_bytes": capacity})
    return children


def _plain(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object, with the command also as one line for a shell."""
    plain: dict[str, Any] = msgspec.to_builtins(
        {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    )
    return plain | {"shell_line": shell_line(plan.command)}


PLAN = Command(
    name="plan",
    summary="what the tiers will hold, what to mind, and the server's command",
    description="Says, before a start, how vLLM cuts a model's KV cache, what each tier holds, and what to mind.",
    examples={
        "plan MODEL --cpu 32GiB --disk /mnt/kv:1TiB": "blocks, bytes, what each tier holds, and the server's command"
    },
    statuses={SOUND: "nothing to mind", PROBLEMS: "it works, with warnings"},
    add_arguments=_add_arguments,
    run=_run,
)
