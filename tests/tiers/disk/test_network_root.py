# SPDX-License-Identifier: Apache-2.0
"""A tier on a root that is not local: a real one over FUSE, whose server is stopped and killed."""

import errno
import math
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.file_systems import fuse_mount, outage, pretend, unmount
from tests.tiers.disk.inside import delay_bookkeeper
from tests.tiers.disk.objects import chain
from tests.tiers.disk.roots import open_tier
from tests.tiers.disk.tier_pair import tier_pair
from tests.waiting import until
from vllm_overlay.common.file_lock import is_held
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk import manager
from vllm_overlay.tiers.disk.files import lease as lease_module
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.lease import Lease
from vllm_overlay.tiers.disk.files.mounts import file_system_of
from vllm_overlay.tiers.disk.files.recognition import LEASE
from vllm_overlay.tiers.disk.files.root import Root, choose_root, is_in_place, reopen_root, takes_direct_io

WITHIN_S = 60.0
"""So soon after an outage objects are stored again."""


def test_a_tier_restores_from_it_after_a_restart(tmp_path):
    with fuse_mount(tmp_path / "source", tmp_path / "mount"):
        root = tmp_path / "mount" / "root"
        with tier_pair(root, host_name="node-7") as made:
            made.recovered().store(chain("p", 3))
        with tier_pair(root, host_name="node-7") as again:
            again.recovered()
            until(lambda: again.tier.advance() or again.coverage(chain("p", 3)) == [True] * 4, "what was stored")
            assert again.reasons(chain("p", 3)) == [""] * 4
        with tier_pair(root, host_name="node-8") as other:
            other.recovered()
            assert len(other.tier.index) == 0


@pytest.mark.parametrize("command", ['find "$0" -type f -delete', 'rm -rf "$0"/*'])
def test_stores_go_on_after_a_cleaner_has_removed_what_is_open(tmp_path, said, command):
    """FUSE gives a file that somebody has open another name instead, as NFS does."""
    with fuse_mount(tmp_path / "source", tmp_path / "mount"):
        root = tmp_path / "mount" / "root"
        with tier_pair(root, host_name="node-7") as made, tier_pair(root, host_name="node-7") as other:
            made.recovered().store(chain("p", 1))
            other.recovered()
            with delay_bookkeeper(made.tier), delay_bookkeeper(other.tier):  # they would make files meanwhile
                subprocess.run(["sh", "-c", command, root])
            for tier in (made, other):
                until(lambda tier=tier: tier.tier.advance() or not tier.has(chain("p", 1)[0]), "the loss")
            made.store_at_last(chain("q", 1)[0])
            until(lambda: other.tier.advance() or other.has(chain("q", 1)[0]), "what the other has stored since")
            assert other.reasons([chain("q", 1)[0]]) == [""]
        assert len(said("was removed or replaced")) == 2
        with tier_pair(root, host_name="node-7") as again:
            until(lambda: again.tier.advance() or again.has(chain("q", 1)[0]), "what was stored since")


def test_stores_go_on_after_an_outage(tmp_path):
    root = tmp_path / "mount" / "root"
    with fuse_mount(tmp_path / "source", tmp_path / "mount") as server:
        with tier_pair(root) as made:
            made.recovered().store(chain("p", 1))
            with outage(server):
                made.store_at_last(chain("q", 1)[0])  # it waits, or fails and is tried again
            began = time.monotonic()
            made.store_at_last(chain("r", 1)[0])
            assert time.monotonic() - began < WITHIN_S
            until(lambda: made.reasons([chain("p", 1)[0], chain("r", 1)[0]]) == ["", ""], "loads of both")
        with tier_pair(root) as again:
            again.recovered()
            until(lambda: again.tier.advance() or again.has(chain("r", 1)[0]), "what was stored after it")


def test_stores_go_on_after_its_server_died_and_was_mounted_again(tmp_path):
    """What was open is dead for ever."""
    source, path = tmp_path / "source", tmp_path / "mount"
    with fuse_mount(source, path) as server, tier_pair(path / "root") as made:
        made.recovered().store(chain("p", 1))
        made.settled()
        server.kill()
        server.wait()
        made.try_store(chain("q", 1)[0])
        unmount(path)
        made.try_store(chain("q", 1)[0])
        made.turned()
        assert list(path.iterdir()) == []
        with fuse_mount(source, path):
            began = time.monotonic()
            made.store_at_last(chain("r", 1)[0])
            assert time.monotonic() - began < WITHIN_S
            until(lambda: made.reasons([chain("p", 1)[0], chain("r", 1)[0]]) == ["", ""], "loads of both")


@contextmanager
def renewed(lease: Lease) -> Iterator[None]:
    """As the machine does that has it."""
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.wait(0.1):
            lease.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def test_a_second_machine_of_the_same_name_is_refused_at_start(tmp_path, monkeypatch):
    """As a container that was copied with its host_name."""
    pretend(monkeypatch, tmp_path, "nfs4")
    monkeypatch.setattr(lease_module, "RENEW_S", 0.1)
    lease = Lease(Device(), choose_root(Device(), str(tmp_path / "root"), "node-7"), "another machine")
    lease.take()
    with renewed(lease):
        with pytest.raises(ConfigError, match="set host_name"):
            open_tier(tmp_path / "root", host_name="node-7")
        open_tier(tmp_path / "root", host_name="node-8")


def test_nothing_is_stored_while_another_machine_has_the_lease(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path, "nfs4")
    monkeypatch.setattr(lease_module, "RENEW_S", 0.0)
    monkeypatch.setattr(lease_module, "WAIT_S", math.inf)  # the other machine lives, however long this takes
    other = Lease(Device(), choose_root(Device(), str(tmp_path / "elsewhere"), "node-7"), "another machine")
    other.take()
    (taken,) = (tmp_path / "elsewhere").rglob(LEASE)
    with tier_pair(tmp_path / "root", host_name="node-7") as made:
        made.recovered().store(chain("p", 1))
        (lease,) = (tmp_path / "root").rglob(LEASE)
        with delay_bookkeeper(made.tier):  # it would write its own over it
            ours = lease.read_bytes()
            lease.write_bytes(taken.read_bytes())
        assert made.turned().try_store(chain("q", 1)[0]) == "no_room"
        lease.write_bytes(ours)
        made.store_at_last(chain("q", 1)[0])


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_start_that_cannot_have_the_lease_now_opens_no_catalogue(tmp_path, monkeypatch, has_lease):
    pretend(monkeypatch, tmp_path, "nfs4")
    device, read = FailingDevice(), []
    monkeypatch.setattr(manager, "read_learned", lambda root, fingerprint: read.append(root.path))
    if not has_lease:
        device.fail(tmp_path / "root" / "host-node-7" / LEASE, errno.EIO, "open")
    with tier_pair(tmp_path / "root", device=device, host_name="node-7", eviction_policy="learned"):
        assert len(read) == has_lease


def test_a_tier_that_ended_cleanly_leaves_its_name_to_the_next_machine(tmp_path, monkeypatch, caplog):
    pretend(monkeypatch, tmp_path, "nfs4")
    open_tier(tmp_path / "root", host_name="node-7")
    Lease(Device(), choose_root(Device(), str(tmp_path / "root"), "node-7"), "another machine").take()
    assert "If it is gone, this takes" not in caplog.text


# Root and lease alone.


def mounted(path: Path) -> Root:
    return choose_root(Device(), str(path / "root"), "node-7")


def test_it_is_not_local_and_each_host_has_its_sub_root(tmp_path):
    with fuse_mount(tmp_path / "source", tmp_path / "mount"):
        root = mounted(tmp_path / "mount")
        assert file_system_of(root.path).startswith("fuse")
        assert (root.path, root.journal) == (str(tmp_path / "mount" / "root" / "host-node-7"), "delete")
        assert is_in_place(root)
        takes_direct_io(Device(), root)
        reopen_root(Device(), root)


def test_two_mounts_are_two_machines_even_on_one(tmp_path, monkeypatch):
    """As two pods on a node, each with its own mount: their locks do not meet."""
    for name in ("RENEW_S", "SETTLE_S", "_POLL_S"):
        monkeypatch.setattr(lease_module, name, 0.1)
    source = tmp_path / "source"
    with fuse_mount(source, tmp_path / "mount"), fuse_mount(source, tmp_path / "again"):
        first, second = (Lease(Device(), mounted(tmp_path / name)) for name in ("mount", "again"))
        first.take()
        with renewed(first), pytest.raises(ConfigError, match="set host_name"):
            second.take()
        first.release()
        second.take()
        second.release()


def test_a_server_that_died_is_an_outage_until_it_is_mounted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.0)
    with fuse_mount(tmp_path / "source", tmp_path / "mount") as server:
        root = mounted(tmp_path / "mount")
        lease = Lease(Device(), root)
        lease.take()
        server.kill()
        server.wait()
        with pytest.raises(OSError):
            is_in_place(root)
        with pytest.raises(OSError):
            reopen_root(Device(), root)
        with pytest.raises(OSError):
            lease.renew()
    assert not is_in_place(root)
    with pytest.raises(OSError, match="another file system"):
        reopen_root(Device(), root)
    assert list((tmp_path / "mount").iterdir()) == []
    with fuse_mount(tmp_path / "source", tmp_path / "mount"):
        assert is_in_place(root)
        reopen_root(Device(), root)
        lease.renew()
        other = Lease(Device(), mounted(tmp_path / "mount"))  # another engine of this machine
        other.take()
        lease.renew()
        other.release()
        assert is_held(str(Path(root.path, LEASE)))
