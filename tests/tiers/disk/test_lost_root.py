# SPDX-License-Identifier: Apache-2.0
"""A root whose disk takes nothing, or that goes while it is used, and what a session makes anew."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.file_systems import disk
from tests.tiers.disk.foreign import forget_marker, make_foreign, state_of
from tests.tiers.disk.roots import WRITER, assert_marked, local, network, opened
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.marker import MARKER
from vllm_overlay.tiers.disk.files.root import is_in_place, reopen_root

# A disk that takes nothing now.


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open", "pwritev"])
def test_a_disk_that_takes_nothing_at_start_is_no_refusal_and_a_root_later(tmp_path, said, call, error):
    device = FailingDevice(**{call: error})
    root = opened(tmp_path / "root", device=device)
    assert said(os.strerror(error))
    with pytest.raises(OSError, match="can be made there now"):
        reopen_root(device, root)
    device.faults.clear()
    reopen_root(device, root)
    assert is_in_place(root)
    assert_marked(tmp_path / "root")


# A root that goes while it is used.


def test_a_root_that_was_removed_is_made_again(tmp_path):
    root = opened(tmp_path / "a" / "root")
    shutil.rmtree(tmp_path / "a")
    assert not is_in_place(root)
    reopen_root(Device(), root)
    assert is_in_place(root)
    assert_marked(tmp_path / "a" / "root")


def test_a_root_that_lost_its_marker_gets_it_back(tmp_path):
    root = opened(tmp_path / "root")
    forget_marker(tmp_path / "root")
    assert not is_in_place(root)
    reopen_root(Device(), root)
    assert_marked(tmp_path / "root")


@pytest.mark.parametrize("kind", ["project", "world", "file"])
def test_a_strangers_directory_in_the_roots_place_is_left_alone(tmp_path, kind):
    root = opened(tmp_path / "root")
    shutil.rmtree(tmp_path / "root")
    if kind == "file":
        (tmp_path / "root").write_text("mine")
    else:
        make_foreign(tmp_path / "root", kind)
    before = state_of(tmp_path / "root")
    assert not is_in_place(root)
    with pytest.raises(OSError, match=f"root='{re.escape(str(tmp_path))}.*: (choose|set)"):
        reopen_root(Device(), root)
    assert state_of(tmp_path / "root") == before


@pytest.mark.parametrize("seen", [local, network])
@pytest.mark.parametrize("below", ["", "root", "to/root"])
def test_a_disk_that_is_taken_away_is_gone_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Callable[..., None], below: str
) -> None:
    seen(monkeypatch, tmp_path)
    with disk(tmp_path / "disk") as made:
        root = opened(made.path / below)
        (Path(root.path) / WRITER).mkdir()
        made.take_away()
        before = state_of(made.path)
        assert not is_in_place(root)
        with pytest.raises(OSError, match="another file system"):
            reopen_root(Device(), root)
        assert state_of(made.path) == before
        made.put_back()
        assert is_in_place(root)
        reopen_root(Device(), root)
        if below:  # what somebody removes on the disk itself is made again there
            shutil.rmtree(made.path / "to" if below == "to/root" else made.path / below)
            reopen_root(Device(), root)
            assert is_in_place(root)
            made.take_away()
            assert not is_in_place(root)


def test_a_root_on_another_disk_counts_when_it_is_marked(tmp_path):
    (tmp_path / "disk").mkdir()
    with disk(tmp_path / "one") as one, disk(tmp_path / "other") as other:
        root = opened(one.path / "root")
        opened(other.path / "root")
        one.take_away()
        one.path.rmdir()
        one.path.symlink_to(other.path)
        assert is_in_place(root)
        reopen_root(Device(), root)
        (other.path / "root" / MARKER).write_bytes(b"{")
        assert not is_in_place(root)
        forget_marker(other.path / "root")
        assert not is_in_place(root)
        with pytest.raises(OSError, match="another file system"):
            reopen_root(Device(), root)
        one.path.unlink()
        one.path.mkdir()
