# SPDX-License-Identifier: Apache-2.0
"""One line a tier at start: what was configured, and what follows from it."""

from vllm_overlay.config import MIB
from vllm_overlay.connector.factory import start_line
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind

FULL = Group(0, GroupKind.FULL, 1152, 256, 1152 * 256, True)
STATE = Group(1, GroupKind.RECURRENT, 1152, 0, 100_000, False)


def test_a_hybrid_model_is_told_what_its_tier_holds() -> None:
    geometry = Geometry.build([FULL, STATE], 64, 64)
    assert start_line("cpu", geometry, 2, 512 * MIB) == (
        f"cpu: {geometry.describe()}; blocks of 1152 tokens; capacity 512.0 MiB in all ranks: "
        "the attention of 1048576 tokens, or 2684 snapshots of 195.3 KiB, or a mix"
    )


def test_a_model_without_states_has_no_snapshots() -> None:
    geometry = Geometry.build([FULL], 64, 64)
    assert start_line("disk", geometry, 1, 64 * MIB).endswith(
        "; blocks of 1152 tokens; capacity 64.0 MiB in all ranks: the attention of 262144 tokens"
    )


def test_a_model_of_states_alone_has_no_attention() -> None:
    line = start_line("cpu", Geometry.build([STATE], 64, "auto"), 1, 1_000_000)
    assert line.endswith("; capacity 976.6 KiB in all ranks: 10 snapshots of 97.7 KiB")


def test_a_tier_that_says_no_capacity_has_none() -> None:
    assert start_line("store", Geometry.build([FULL], 64, 64), 1, None).endswith("; blocks of 1152 tokens")
