# SPDX-License-Identifier: Apache-2.0
"""A root that a test opens as a start does."""

import stat
from pathlib import Path

import pytest

from tests.tiers.disk.file_systems import pretend
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.marker import MARKER, encode_marker
from vllm_overlay.tiers.disk.files.root import Root, choose_root

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
