# SPDX-License-Identifier: Apache-2.0
"""A root that a test opens: as a start does, as either half of the tier does, or as one that has joined."""

import os
import stat
from pathlib import Path

import pytest

from tests.tiers.disk.file_systems import pretend
from tests.tiers.disk.objects import OBJECT
from tests.tiers.disk.tier_pair import NAMESPACE, close_tier, settings
from vllm_overlay.tiers.disk.files.checksum import XXH3
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.marker import MARKER, encode_marker
from vllm_overlay.tiers.disk.files.mounts import WRITE_AHEAD
from vllm_overlay.tiers.disk.files.root import Root, choose_root
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.site import Seat, Site
from vllm_overlay.tiers.disk.volume import Quota
from vllm_overlay.tiers.disk.worker import DiskTierWorker

WRITER = "0123456789abcdef"


def opened(path: Path, host_name: str = "", device: Device | None = None) -> Root:
    return choose_root(device or Device(), str(path), host_name)


def assert_marked(root: Path, journal: str = "wal") -> None:
    path = root / MARKER
    assert path.read_bytes() == encode_marker(journal)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "nfs4")


def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "ext4")


def open_tier(root, device=None, **changes):
    close_tier(DiskTierManager(settings(root, **changes), NAMESPACE, 1, OBJECT, device))


def open_worker(root, device=None, **changes):
    DiskTierWorker(settings(root, **changes), NAMESPACE, 0, 1, 8192, OBJECT, device).close(1.0)


HALVES = pytest.mark.parametrize("start", [open_tier, open_worker])


def seat_in(root, catalogue, writer, device):
    """The place of an engine that has joined the catalogue of a root on a local disk."""
    quota = Quota(capacity_bytes=1 << 30, min_free_bytes=0, largest_bytes=OBJECT)
    return Seat(Site(Root(str(root), WRITE_AHEAD, os.stat(root).st_dev), device, XXH3, quota, 1), catalogue, writer)
