# SPDX-License-Identifier: Apache-2.0
"""What a start says: what a tier holds, that nobody has run a device, and that copies do not work."""

import logging

import numpy as np
import pytest
import torch

from tests.logged import logged_by
from vllm_overlay.config import MIB, ConfigError
from vllm_overlay.connector import factory
from vllm_overlay.connector.factory import start_line
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.tiers.factory import tier_spec
from vllm_overlay.transfer.cpu import CpuTransfer
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.self_check import TransferError

SETTINGS = tier_spec({"tier": "cpu", "name": "host", "device_buffer_bytes": "3 MiB"}).settings
MEMORY = (np.zeros((2, 8), dtype=np.uint8),)


def tensors(device: str) -> dict[int, GroupTensors]:
    return {0: GroupTensors((torch.empty(2, 1, 4, 8, device=device),))}


def test_on_a_cpu_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(factory._transfer(SETTINGS, tensors("cpu"), MEMORY, is_first_rank=True), CpuTransfer)
    assert logged_by(factory, caplog) == []


@pytest.mark.parametrize("is_first_rank", [True, False])
def test_on_a_device_one_rank_says_how_little_was_run_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_first_rank: bool
) -> None:
    given = []
    monkeypatch.setattr(factory, "build_transfer", lambda *arguments: given.append(arguments))
    on_device = tensors("meta")
    with caplog.at_level(logging.WARNING):
        factory._transfer(SETTINGS, on_device, MEMORY, is_first_rank=is_first_rank)
    assert given == [(on_device, MEMORY, 3 << 20)]
    assert [record.getMessage() for record in logged_by(factory, caplog)] == [
        f"host: {factory.NEW_ON_GPUS}"
    ] * is_first_rank


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA"), r"no room left for device_buffer_bytes=3145728: lower it, or --gpu"),
        (TransferError("other bytes: remove it"), "host: copies to and from meta do not work: other bytes: remove it"),
    ],
)
def test_a_device_that_cannot_be_used_is_a_refusal_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(factory, "build_transfer", fails)
    with pytest.raises(ConfigError, match=words):
        factory._transfer(SETTINGS, tensors("meta"), MEMORY, is_first_rank=True)


FULL = Group(0, GroupKind.FULL, 1152, 256, 1152 * 256, True)
STATE = Group(1, GroupKind.RECURRENT, 1152, 0, 100_000, False)


@pytest.mark.parametrize(
    ("groups", "world_size", "capacity_bytes", "words"),
    [
        ([FULL, STATE], 2, 512 * MIB, "the attention of 1048576 tokens, or 2684 snapshots of 195.3 KiB, or a mix"),
        ([FULL], 1, 512 * MIB, "the attention of 2097152 tokens"),
        ([STATE], 1, 512 * MIB, "5368 snapshots of 97.7 KiB"),
        ([FULL], 1, None, ""),
    ],
    ids=["hybrid", "without states", "of states alone", "a tier that says no capacity"],
)
def test_a_start_says_what_the_tier_holds_of_this_model(
    groups: list[Group], world_size: int, capacity_bytes: int | None, words: str
) -> None:
    geometry = Geometry.build(groups, 64, "auto" if groups == [STATE] else 64)
    held = f"; capacity 512.0 MiB in all ranks: {words}" if words else ""
    line = start_line("cpu", geometry, world_size, capacity_bytes)
    assert line == f"cpu: {geometry.describe()}; blocks of 1152 tokens{held}"
