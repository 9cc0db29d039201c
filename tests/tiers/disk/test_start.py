# SPDX-License-Identifier: Apache-2.0
"""How a tier opens its root, and which roots and settings it refuses."""

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import bytes_under, on_disk, temporaries
from tests.tiers.disk.foreign import make_foreign, state_of
from tests.tiers.disk.halves import open_tier
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair, tier_pair
from tests.waiting import until
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.files.marker import MARKER, encode_marker
from vllm_overlay.tiers.disk.files.root import lock_directory


def test_the_root_is_created_private_and_says_whose_it_is(tmp_path):
    root = tmp_path / "a" / "root"
    with tier_pair(root) as made:
        made.recovered()
        until(lambda: all((root / name / "namespace.json").exists() for name in NAMESPACE.fingerprints))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for fingerprint in NAMESPACE.fingerprints:
        words = json.loads((root / fingerprint / "namespace.json").read_text())
        assert words["description"] == NAMESPACE.description
    assert temporaries(root) == []


def test_a_root_whose_path_is_not_utf_8_is_a_root(tmp_path):
    with tier_pair(tmp_path / os.fsdecode(b"caf\xe9")) as made:
        made.recovered().store(chain("p", 1))
        assert made.reasons(chain("p", 1)) == ["", ""]


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(ConfigError, match=r"root=.* is not a directory"):
        open_tier(tmp_path / "root")
    with pytest.raises(ConfigError, match=r"root=.* cannot be created"):
        open_tier(tmp_path / "root" / "below")


@pytest.fixture
def as_nobody():
    """A directory, and this process without root's rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    os.seteuid(0)
    shutil.rmtree(directory)


def test_a_root_of_another_user_is_refused(as_nobody):
    os.seteuid(65534)
    with pytest.raises(ConfigError, match=r"root=.* belongs to user 0"):
        open_tier(as_nobody)


def test_a_root_that_cannot_be_written_is_refused(as_nobody):
    os.chown(as_nobody, 65534, 65534)
    as_nobody.chmod(0o500)
    os.seteuid(65534)
    with pytest.raises(ConfigError, match=r"root=.* is not writable"):
        open_tier(as_nobody)
    with pytest.raises(ConfigError, match=r"root=.* cannot be created"):
        open_tier(as_nobody / "below")


def take_locks_from(monkeypatch, directory):
    """No file under ``directory`` can be locked any more."""
    real = fcntl.flock

    def flock(fd, operation):
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(directory):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(fd, operation)

    monkeypatch.setattr("fcntl.flock", flock)


def test_without_locks_anywhere_a_root_is_refused(tmp_path, monkeypatch):
    take_locks_from(monkeypatch, "/")
    with pytest.raises(ConfigError, match=r"root=.* takes no file locks"):
        open_tier(tmp_path / "root")


@pytest.fixture
def lockless(tmp_path, monkeypatch):
    """A root on a file system without locks, and a local directory with them."""
    (tmp_path / "local").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    take_locks_from(monkeypatch, tmp_path / "root")
    return tmp_path / "root"


def host_root(root):
    """The one sub-root."""
    (found,) = [path for path in root.iterdir() if path.name.startswith("host-")]
    return found


def test_without_locks_a_host_has_its_sub_root_and_limit_and_the_log_says_so(lockless, said):
    capacity = 15 * on_disk()
    with tier_pair(lockless, capacity_bytes=capacity) as made, tier_pair(lockless, capacity_bytes=capacity) as other:
        root = host_root(lockless)
        words = said("has no file locks")
        assert words and str(root) in words[0] and "for this host alone" in words[0]
        seen = []
        for turn in range(20):
            for number, one in enumerate((made, other)):
                one.store(chain(f"{turn} of {number}", 2))
                seen.append(bytes_under(root))
        assert max(seen) <= capacity
        catalogue = Catalogue(lock_directory(str(root)))
        assert catalogue.count_living() == 2
        assert [usage.is_served for usage in catalogue.usage()] == [True, True]
        catalogue.close()
    with tier_pair(lockless, capacity_bytes=capacity) as again:
        again.recovered()
        assert len(again.tier.index) > 0


def test_two_hosts_without_locks_do_not_meet(lockless, monkeypatch):
    with tier_pair(lockless) as made:
        made.store(chain("p", 1))
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        with tier_pair(lockless) as other:
            other.recovered()
            assert len(other.tier.index) == 0
            other.store(chain("p", 1))
    assert len([path for path in lockless.iterdir() if path.name.startswith("host-")]) == 2


def test_without_locks_the_root_the_sub_root_and_the_locks_are_marked(lockless):
    for _ in range(2):
        open_tier(lockless)
        own = host_root(lockless)
        for directory in (lockless, own, Path(lock_directory(str(own)))):
            assert (directory / MARKER).read_bytes() == encode_marker()


def test_without_locks_a_strangers_directory_is_refused(lockless):
    make_foreign(lockless, "project")
    before = state_of(lockless)
    with pytest.raises(ConfigError, match="empty directory"):
        open_tier(lockless)
    assert state_of(lockless) == before


def test_without_locks_a_directory_of_locks_that_was_cleaned_up_is_made_again(lockless):
    with tier_pair(lockless) as made:
        made.store(chain("p", 1))
        locks = Path(lock_directory(str(host_root(lockless))))
        shutil.rmtree(locks)
        made.store_at_last(chain("q", 1)[0])
        until(lambda: (locks / MARKER).exists(), "a directory of locks")


def test_without_locks_a_sub_root_that_was_removed_is_made_again(lockless, tmp_path):
    with tier_pair(lockless) as made:
        made.store(chain("p", 1))
        own = host_root(lockless)
        shutil.rmtree(own.rename(tmp_path / "gone"), ignore_errors=True)  # at once: others write to it
        until(lambda: (own / MARKER).exists(), "a sub-root")
        made.store_at_last(chain("q", 1)[0])


def test_a_policy_of_somebody_is_refused_because_no_other_process_knows_it(tmp_path):
    with pytest.raises(ConfigError, match='set it to "learned" or "lru"'):
        open_tier(tmp_path / "root", eviction_policy="vllm_overlay.tiers.policies.lru:LeastRecentlyUsed")


def test_a_capacity_below_two_objects_is_refused_with_one_that_works(tmp_path):
    with pytest.raises(ConfigError, match="capacity_bytes") as refusal:
        open_tier(tmp_path / "root", capacity_bytes=on_disk())
    open_tier(tmp_path / "root", capacity_bytes=int(str(refusal.value).split()[-1]))


def test_a_full_or_failing_disk_at_start_is_not_fatal(tmp_path):
    device = FailingDevice(open=errno.ENOSPC)
    made = TierPair(tmp_path / "root", device=device)
    assert made.try_store(chain("p", 1)[0]) in ("no_room", "no_space")
    device.faults.clear()
    made.store(chain("p", 1))
    made.close()
