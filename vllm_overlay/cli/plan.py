# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay plan``: what a server will have, before it is started, and the command that starts it."""

import argparse
import json
import shlex

import msgspec

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import Rows, show_table, shown, size
from vllm_overlay.cli.tier_flags import add_tier_flags, children_of, server_arguments
from vllm_overlay.config import ConfigError
from vllm_overlay.planning.capacity import Conversation
from vllm_overlay.planning.plan import Plan, make_plan


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_tier_flags(parser, "[--conversation-tokens N] [--turns N] [--platform cuda] [--json]")
    parser.epilog = """\
Asks the vLLM that is installed here, in a quarter to half a minute. It needs the model's config.json, no weights, no
network and no memory of a device. vLLM chooses by the processor and the device: ask on the machine that will serve.
Flags of vLLM's server are weighed, and are in the command.

example:
  vllm-overlay plan /models/Qwen3.5-35B-A3B --cpu 32GiB --disk /mnt/kv:1TiB --max-model-len 65536
  vllm-overlay plan /models/Qwen3.5-35B-A3B --cpu 32GiB --disk /mnt/kv:1TiB --platform cuda
"""
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
    parser.add_argument(
        "--platform",
        choices=["cuda"],
        default="",
        help="plan for a GPU: vLLM's own copies, and our disk tier below them (default: our own copies)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.conversation_tokens < 1 or arguments.turns < 1:
        raise ConfigError("--conversation-tokens and --turns must be at least 1, such as 8000 and 1")
    conversation = Conversation(arguments.conversation_tokens, arguments.turns)
    children = children_of(arguments)
    plan = make_plan(server_arguments(arguments), children, conversation, platform=arguments.platform)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(plan) | {"shell_line": shlex.join(plan.command)}, indent=2))
    else:
        _show(plan)
    return PROBLEMS if plan.has_warnings else SOUND


def _show(plan: Plan) -> None:
    show_table("", _engine_rows(plan))
    print()
    show_table("what each tier holds, all ranks together", _tier_rows(plan), has_header=True)
    print()
    for tier in plan.tiers:
        print(f"{shown(tier.name)}: {tier.geometry}")
    print()
    for item in plan.advice:
        print(f"{item.severity.value}: {item.setting}: {shown(item.sentence)}")
    if plan.advice:
        print()
    print(shlex.join(plan.command))


def _engine_rows(plan: Plan) -> Rows:
    layout = plan.layout
    states = sum(group.page_bytes for group in layout.groups if not group.is_attention)
    rows = [
        ("model", shown(plan.flags.model)),
        ("asked", f"vLLM {layout.vllm} on this machine ({layout.platform})"),
        ("block size N", f"{layout.block_size} tokens"),
        ("match unit", f"{plan.match_unit} tokens"),
        ("KV cache groups", f"{len(layout.groups)}, of {layout.dtype}"),
    ]
    if layout.has_states:
        rows.append(("states", f"{size(states)} a rank, {layout.state_dtype}"))
    rows.append(("tokens a step", str(layout.max_num_batched_tokens)))
    rows.append(("longest request", f"{layout.max_model_len} tokens"))
    return rows


def _tier_rows(plan: Plan) -> Rows:
    conversations = f"conversations of {plan.conversation.num_tokens}"
    header = ("tier", "room", "chunk", "restores at", "a token", "a snapshot", "tokens", "or snapshots", conversations)
    rows = [
        (
            shown(tier.name),
            size(tier.capacity_bytes),
            f"{tier.chunk_tokens}",
            f"{tier.restore_unit_tokens}",
            size(round(tier.token_bytes)),
            size(tier.snapshot_bytes) if tier.snapshot_bytes else "none",
            f"{tier.num_tokens:,}",
            f"{tier.num_snapshots:,}",
            f"{tier.num_conversations:,}",
        )
        for tier in plan.tiers
    ]
    return [header, *rows]


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
    passes_on=True,
)
