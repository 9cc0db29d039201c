# SPDX-License-Identifier: Apache-2.0
"""Whether a directory is this machine's own: by the type of the file system that it lies on."""

import os
from pathlib import Path

import pytest

from tests.tiers.disk.file_systems import disk, fuse_mount, pretend
from vllm_overlay.tiers.disk.files import mounts
from vllm_overlay.tiers.disk.files.mounts import file_system_of, journal_of

LOCAL = ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay")
SHARED = (
    "nfs", "nfs4", "cifs", "ceph", "lustre", "fuse", "fuse.sshfs", "fuse.glusterfs", "fuseblk", "virtiofs", "9p",
    "a-new-one", "ext5", "",
)  # fmt: skip


@pytest.mark.parametrize("kind", LOCAL + SHARED)
def test_only_what_is_known_to_be_local_gets_a_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pretend(monkeypatch, tmp_path, kind)
    assert file_system_of(str(tmp_path)) == kind
    assert journal_of(str(tmp_path)) == ("wal" if kind in LOCAL else "delete")


@pytest.mark.parametrize(
    "left", [{}, {"mountinfo": b""}, {"mountinfo": b"\xff\n1 2 3\n - \n"}, {"fdinfo": b"pos:\t0\n"}]
)
def test_what_the_kernel_does_not_say_is_not_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: dict[str, bytes]
) -> None:
    pretend(monkeypatch, tmp_path, "ext4")
    if "mountinfo" in left:
        (tmp_path / "proc" / "mountinfo").write_bytes(left["mountinfo"])
    elif left:
        (tmp_path / "proc" / "fdinfo").unlink()
        (tmp_path / "proc" / "fdinfo").mkdir()
        for fd in range(1024):
            (tmp_path / "proc" / "fdinfo" / str(fd)).write_bytes(left["fdinfo"])
    else:
        monkeypatch.setattr(mounts, "_PROCESS", tmp_path / "none")
    assert file_system_of(str(tmp_path)) == ""
    assert journal_of(str(tmp_path)) == "delete"


@pytest.mark.parametrize("name", [b"a space", b"a\nline", rb"\040", rb"\xff", b"caf\xe9", "grün".encode(), b"- nfs4 -"])
def test_a_mount_of_any_name_is_found(tmp_path: Path, name: bytes) -> None:
    with disk(tmp_path / os.fsdecode(name)) as made:
        (made.path / "root").mkdir()
        for path in (made.path, made.path / "root", made.path / "root" / "to" / "be"):
            assert file_system_of(str(path)) == "tmpfs"
        (tmp_path / "link").symlink_to(made.path)
        assert file_system_of(str(tmp_path / "link" / "root")) == "tmpfs"
    assert file_system_of(str(tmp_path / os.fsdecode(name))) == file_system_of(str(tmp_path))


def test_what_is_mounted_last_at_a_path_counts(tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as made, fuse_mount(tmp_path / "source", made.path):
        assert file_system_of(str(made.path)) == "fuse"
        assert journal_of(str(made.path / "root")) == "delete"
    assert file_system_of(str(tmp_path)) != "fuse"
