# SPDX-License-Identifier: Apache-2.0
"""Files of removed objects are unlinked several at a time, and what cannot be unlinked keeps its name."""

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Catalogue, Name, Namespace, RemovedObject
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.maintenance.remover import UNLINK_THREADS, Remover

FINGERPRINT = "a" * 64
NUM_OBJECTS = 8


class WaitingDevice(Device):
    """Whoever unlinks waits until three others do."""

    def __init__(self) -> None:
        self._together = threading.Barrier(4)

    def unlink(self, path: str) -> None:
        self._together.wait(PATIENCE_S)
        super().unlink(path)


class StuckDevice(Device):
    """Does not unlink the files of some keys."""

    def unlink(self, path: str) -> None:
        if os.path.basename(path).startswith("0003"):
            raise OSError(errno.EIO, "a bad sector")
        super().unlink(path)


class DefectiveDevice(Device):
    def unlink(self, path: str) -> None:
        raise IndexError("a defect")


def removed_objects(root: Path) -> list[RemovedObject]:
    (root / FINGERPRINT / "00").mkdir(parents=True)
    names = [Name(FINGERPRINT, ObjectId("f0", bytes([0, number]))) for number in range(NUM_OBJECTS)]
    for name in names:
        (root / FINGERPRINT / "00" / f"{name.object_id.key.hex()}.f0.r0").write_bytes(b"")
    return [RemovedObject(name, 1, 4096) for name in names]


def remover_of(root: Path, device: Device, num_threads: int = UNLINK_THREADS) -> Remover:
    catalogue = Catalogue(str(root))
    catalogue.join([Namespace(FINGERPRINT, FINGERPRINT)], 1)
    return Remover(catalogue, str(root), device, num_threads)


def files_of(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*.f0.r0"))


def test_a_file_system_that_keeps_one_unlink_waiting_does_not_keep_the_others(tmp_path: Path) -> None:
    remover_of(tmp_path, WaitingDevice()).finish(removed_objects(tmp_path))
    assert files_of(tmp_path) == []


def test_a_file_that_cannot_be_unlinked_is_tried_again(tmp_path: Path) -> None:
    remover = remover_of(tmp_path, device := StuckDevice())
    remover.finish(removed_objects(tmp_path))
    assert files_of(tmp_path) == ["0003.f0.r0"]
    device.unlink = Device().unlink  # type: ignore[method-assign]
    remover.finish()
    assert files_of(tmp_path) == []


def test_a_defect_in_a_thread_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="a defect"):
        remover_of(tmp_path, DefectiveDevice()).finish(removed_objects(tmp_path))
