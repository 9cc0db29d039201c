# SPDX-License-Identifier: Apache-2.0
"""A root that several hosts may see."""

import shutil
from pathlib import Path

import pytest

from tests.tiers.disk.foreign import state_of
from tests.tiers.disk.roots import assert_marked, local, network, opened
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files import root as root_module
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.marker import NotARootError
from vllm_overlay.tiers.disk.files.recognition import host_roots, require_root
from vllm_overlay.tiers.disk.files.root import is_in_place, reopen_root


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that seems to lie on a network's file system."""
    network(monkeypatch, tmp_path)
    return tmp_path / "root"


def test_a_host_has_its_own_sub_root_and_the_log_says_so(shared, caplog):
    caplog.set_level("INFO")
    root = opened(shared, "node-7")
    assert (root.path, root.journal) == (str(shared / "host-node-7"), "delete")
    assert_marked(shared, "delete")
    assert_marked(shared / "host-node-7", "delete")
    (said,) = [record.getMessage() for record in caplog.records if "several hosts" in record.getMessage()]
    for words in ("nfs4", str(shared / "host-node-7"), "for this host alone"):
        assert words in said
    opened(shared, "node-8")
    assert host_roots(str(shared)) == [str(shared / "host-node-7"), str(shared / "host-node-8")]


def test_a_local_root_has_no_sub_root(tmp_path):
    assert opened(tmp_path / "root", "node-7").path == str(tmp_path / "root")
    assert host_roots(str(tmp_path / "root")) == []


def test_without_a_name_a_host_is_its_machine_or_else_its_host_name(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(root_module, "_MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr("socket.gethostname", lambda: "pod-1")
    names = []
    for machine in ("a" * 32 + "\n", "b" * 32 + "\n", "uninitialized\n", "", None):
        (tmp_path / "machine-id").unlink(missing_ok=True)
        if machine is not None:
            (tmp_path / "machine-id").write_text(machine)
        names.append(opened(shared).path)
        assert opened(shared).path == names[-1]
    assert len(set(names)) == 3 and len(set(names[2:])) == 1
    monkeypatch.setattr("socket.gethostname", lambda: "pod-2")
    assert opened(shared).path not in names
    assert not any("a" * 32 in name for name in names)


@pytest.mark.parametrize("name", ["..", "a/b", "-", ".", "a b", "n" * 65, "caf\u00e9"])
def test_a_host_name_that_is_no_name_of_a_directory_is_refused(shared, name):
    with pytest.raises(ConfigError, match=r'host_name=.*: set it to .* "node-7"'):
        opened(shared, name)


@pytest.mark.parametrize(("first", "then"), [(local, network), (network, local)])
def test_a_root_that_is_seen_by_another_way_than_it_was_made_is_refused(tmp_path, monkeypatch, first, then):
    """As by an NFS server, on its own disk."""
    first(monkeypatch, tmp_path)
    root = opened(tmp_path / "root", "node-7")
    then(monkeypatch, tmp_path)
    before = state_of(tmp_path / "root")
    ways = "on a local disk.*over a network" if first is local else "over a network.*on a local disk"
    with pytest.raises(ConfigError, match=f"root=.*{ways}.*set root to"):
        opened(tmp_path / "root", "node-7")
    with pytest.raises(OSError, match=ways):
        reopen_root(Device(), root)
    with pytest.raises(NotARootError, match=ways):
        require_root(str(tmp_path / "root"))
    assert state_of(tmp_path / "root") == before


def test_a_sub_root_that_was_removed_is_made_again_with_the_root(shared):
    root = opened(shared, "node-7")
    shutil.rmtree(shared)
    assert not is_in_place(root)
    reopen_root(Device(), root)
    assert is_in_place(root)
    assert_marked(shared, "delete")
