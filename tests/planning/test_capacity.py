# SPDX-License-Identifier: Apache-2.0
"""What a plan promises is what a tier holds: as many conversations are stored, and one more evicts."""

import pytest

from tests.planning.layouts import QWEN_0_8B, halved
from vllm_overlay.config import MIB, ConfigError
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.planning.capacity import Conversation, TierCapacity, geometry_of, tier_capacity
from vllm_overlay.tiers.cpu import Arena, CpuTierSpec
from vllm_overlay.tiers.disk.files.format import file_bytes
from vllm_overlay.tiers.factory import tier_spec

UNIT, STEP_TOKENS = 32, 2048
CPU = {"tier": "cpu", "capacity_bytes": "700 MiB"}
DISK = {"tier": "disk", "root": "/nowhere", "capacity_bytes": "1 GiB"}


def capacity_of(child: dict[str, str], conversation: Conversation, ranks: int = 1) -> tuple[TierCapacity, Geometry]:
    spec = tier_spec(child)
    geometry = geometry_of(QWEN_0_8B if ranks == 1 else halved(QWEN_0_8B), UNIT, spec)
    found = tier_capacity(spec, geometry, ranks, STEP_TOKENS, conversation)
    assert found is not None
    return found, geometry


def objects_of(geometry: Geometry, number: int, num_tokens: int) -> list[PlannedObject]:
    """All that one conversation leaves, parents first: its chunks, and the snapshot of its last restore point."""
    keys = [number.to_bytes(4, "big") + index.to_bytes(4, "big") for index in range(num_tokens // UNIT)]
    planner = HybridOffloadPlanner(geometry)
    (group,) = geometry.full
    chunks = [planner.chunk(keys, group, index) for index in range(num_tokens // geometry.chunk_size_of(group))]
    return [*chunks, planner.snapshot(keys, num_tokens)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpu_tier_holds_as_many_conversations_as_promised_and_not_one_more(ranks: int) -> None:
    found, geometry = capacity_of(CPU, Conversation(2048), ranks)
    spec = tier_spec(CPU)
    assert isinstance(spec, CpuTierSpec)
    unit_bytes = geometry.smallest_object_bytes
    manager = spec.build_manager(geometry, ranks, STEP_TOKENS, Arena(700 * MIB // ranks // unit_bytes, unit_bytes))

    def store(number: int) -> None:
        for planned in objects_of(geometry, number, 2048):
            ticket = manager.reserve(planned)
            assert ticket is not None
            manager.commit(ticket.ticket)

    for number in range(found.num_conversations):
        store(number)
    assert manager.usage().evicted_objects == 0
    assert found.num_conversations > 3
    store(found.num_conversations)
    assert manager.usage().evicted_objects > 0


def test_a_disk_tier_counts_whole_files_and_what_is_set_aside_for_writers() -> None:
    found, geometry = capacity_of(DISK, Conversation(2176))
    (group,) = geometry.full
    files = 2176 // geometry.chunk_size * file_bytes(geometry.chunk_bytes(group))
    assert found.conversation_bytes == files + file_bytes(geometry.max_snapshot_bytes)
    step_bytes = STEP_TOKENS * geometry.token_bytes + geometry.max_snapshot_bytes
    assert (1 << 30) - found.capacity_bytes == min(2 * step_bytes, (1 << 30) // 8)
    assert found.num_conversations == found.capacity_bytes // found.conversation_bytes


def test_each_turn_and_each_retained_state_is_a_snapshot_more() -> None:
    one, _ = capacity_of(CPU, Conversation(8000))
    turns, _ = capacity_of(CPU, Conversation(8000, num_turns=3))
    kept, _ = capacity_of(CPU, Conversation(8000, retention_interval=544))
    assert turns.conversation_bytes - one.conversation_bytes == 2 * one.snapshot_bytes
    assert kept.conversation_bytes - one.conversation_bytes == 14 * one.snapshot_bytes


@pytest.mark.parametrize(
    ("child", "message"),
    [
        ({"tier": "cpu", "capacity_bytes": "1 MiB"}, "of the CPU tier is smaller than one snapshot and its attention"),
        ({**DISK, "capacity_bytes": "1 MiB"}, "of the disk tier cannot hold two of the largest objects"),
    ],
)
def test_a_capacity_that_a_server_refuses_is_refused_in_its_words(child: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capacity_of(child, Conversation(8000))
