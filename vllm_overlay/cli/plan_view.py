# SPDX-License-Identifier: Apache-2.0
"""How a plan is printed."""

from vllm_overlay.cli.console import shown, size
from vllm_overlay.cli.table import Rows, show_table
from vllm_overlay.planning.plan import Plan
from vllm_overlay.planning.server_command import shell_line


def show_plan(plan: Plan) -> None:
    """Prints everything that an operator asked for."""
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
    print(shell_line(plan.command))


def _engine_rows(plan: Plan) -> Rows:
    layout = plan.layout
    states = sum(group.page_bytes for group in layout.groups if not group.is_attention)
    rows = [
        ("model", shown(plan.question.model)),
        ("block size N", f"{layout.block_size} tokens, {layout.origin}"),
        ("match unit", f"{plan.match_unit} tokens"),
        ("KV cache groups", f"{len(layout.groups)}, of {layout.dtype}"),
    ]
    if layout.has_states:
        rows.append(("states", f"{size(states)} a rank, {layout.state_dtype}"))
    if layout.max_num_batched_tokens:
        rows.append(("tokens a step", str(layout.max_num_batched_tokens)))
    if layout.max_model_len:
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
