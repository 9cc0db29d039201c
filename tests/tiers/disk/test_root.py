# SPDX-License-Identifier: Apache-2.0
"""What a start takes for a root: a directory with a marker, one that lost it, an empty one, and nothing else."""

import errno
import json
import os
import re
import stat
import threading

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import counted, lose_catalogue, on_disk, temporaries
from tests.tiers.disk.foreign import KINDS, forget_marker, make_foreign, state_of
from tests.tiers.disk.halves import HALVES, open_tier
from tests.tiers.disk.inside import delay_bookkeeper
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, TierPair, tier_pair
from tests.waiting import PATIENCE_S, until
from vllm_overlay import versions
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.marker import MARKER, encode_marker, require_marker


def assert_marked(root):
    path = root / MARKER
    assert path.read_bytes() == encode_marker()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


@HALVES
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_is_no_root_is_refused_and_nothing_in_it_changes(tmp_path, kind, start):
    directory = make_foreign(tmp_path / "theirs", kind)
    before = state_of(directory)
    with pytest.raises(ConfigError, match=f"root='{re.escape(str(directory))}' .*empty directory.*theirs/vllm-kv"):
        start(directory)
    assert state_of(directory) == before


def test_the_refusal_names_what_it_found_without_harm_to_the_log(tmp_path):
    (tmp_path / "\x1b[2Jbell\n").write_text("")
    (tmp_path / ("n" * 255)).write_text("")
    with pytest.raises(ConfigError) as refusal:
        open_tier(tmp_path)
    assert "bell" in str(refusal.value)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500 + len(str(tmp_path))


@HALVES
def test_a_new_root_and_an_empty_one_get_a_marker(tmp_path, start):
    (tmp_path / "mount" / "lost+found").mkdir(parents=True)
    for root in (tmp_path / "new", tmp_path / "mount"):
        start(root)
        assert_marked(root)
        before = (root / MARKER).stat().st_ino
        start(root)
        assert (root / MARKER).stat().st_ino == before
    said = json.loads((tmp_path / "new" / MARKER).read_text())
    assert (said["version"], said["written_by"]) == (versions.DISK_ROOT, versions.PACKAGE)


def test_what_a_killed_start_left_counts_as_empty(tmp_path):
    (tmp_path / ".tmp.00000000.1.2.3").write_text("half")
    (tmp_path / "weights.lock").touch()
    (tmp_path / MARKER).touch()
    open_tier(tmp_path)
    assert_marked(tmp_path)


@pytest.fixture
def lost_marker(tmp_path):
    """A root of this version, with a chain of objects, whose marker somebody has removed."""
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
    forget_marker(tmp_path / "root")
    return tmp_path / "root"


def test_a_root_that_lost_its_marker_is_recognised_and_keeps_its_objects(lost_marker):
    with tier_pair(lost_marker) as made:
        made.recovered()
        assert made.coverage(chain("p", 2)) == [True] * 3
    assert_marked(lost_marker)


def test_a_root_that_lost_all_its_files_is_a_root_that_is_empty(lost_marker):
    """As ``find ROOT -type f -delete`` leaves it."""
    for path in lost_marker.rglob("*"):
        if path.is_file():
            path.unlink()
    with tier_pair(lost_marker) as made:
        made.store(chain("p", 2))
        assert made.reasons(chain("p", 2)) == [""] * 3
    assert_marked(lost_marker)


def test_a_stranger_in_a_root_without_marker_is_too_much(lost_marker):
    (lost_marker / "notes.txt").write_text("somebody's")
    with pytest.raises(ConfigError, match="empty directory"):
        open_tier(lost_marker)
    assert not (lost_marker / MARKER).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 4096, b"x" * 100_000, b'{"version": 1}'])
def test_a_damaged_marker_of_a_root_is_written_anew(lost_marker, content):
    (lost_marker / MARKER).write_bytes(content)
    open_tier(lost_marker)
    assert_marked(lost_marker)


def test_a_marker_that_others_may_write_says_nothing(tmp_path):
    directory = make_foreign(tmp_path / "theirs", "project")
    (directory / MARKER).write_bytes(encode_marker())
    (directory / MARKER).chmod(0o666)
    with pytest.raises(ConfigError, match="empty directory"):
        open_tier(directory)
    (directory / MARKER).chmod(0o600)
    open_tier(directory)


def test_a_marker_of_a_later_format_is_refused_with_the_version_that_wrote_it(tmp_path):
    later = {**json.loads(encode_marker()), "version": versions.DISK_ROOT + 1, "written_by": "9.8.7", "new": [1]}
    open_tier(tmp_path / "root")
    (tmp_path / "root" / MARKER).write_text(json.dumps(later))
    before = state_of(tmp_path / "root")
    with pytest.raises(ConfigError, match=r"root=.* vllm-overlay 9\.8\.7 .*format 2"):
        open_tier(tmp_path / "root")
    assert state_of(tmp_path / "root") == before


def test_two_that_start_on_an_empty_directory_at_once_both_work(tmp_path):
    both = threading.Barrier(2)

    class Meeting(Device):
        """Each waits for the other before its marker gets its name."""

        def rename(self, source, target):
            if target.endswith(MARKER):
                both.wait(PATIENCE_S)
            super().rename(source, target)

    failures = []

    def start():
        try:
            open_tier(tmp_path / "root", Meeting())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert_marked(tmp_path / "root")
    assert temporaries(tmp_path / "root") == []


def test_what_another_makes_while_a_start_looks_is_no_strangers(tmp_path, monkeypatch):
    """The marker comes before all else, so a start that saw something looks for it once more."""
    root = tmp_path / "root"
    listdir = os.listdir

    def while_another_starts(path):
        if str(path) == str(root) and not (root / MARKER).exists():
            (root / MARKER).write_bytes(encode_marker())
            (root / MARKER).chmod(0o600)
            (root / "members").mkdir()
            return ["members"]
        return listdir(path)

    monkeypatch.setattr("os.listdir", while_another_starts)
    open_tier(root)


def test_a_full_disk_at_start_leaves_a_root_that_the_next_second_marks(tmp_path):
    device = FailingDevice(pwritev=errno.ENOSPC)
    made = TierPair(tmp_path / "root", device=device)
    assert made.try_store(chain("p", 1)[0]) in ("no_room", "no_space")
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == []
    device.faults.clear()
    made.store(chain("p", 1))
    made.close()
    assert_marked(tmp_path / "root")


def replace_with_strangers(made):
    """Before anybody makes another root there."""
    with delay_bookkeeper(made.tier):
        made.root.rename(made.root.with_name("was"))
        make_foreign(made.root, "project")


def test_a_strangers_directory_in_the_roots_place_is_left_alone(tmp_path, said):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 1))
        replace_with_strangers(made)
        before = state_of(root)
        until(lambda: said("empty directory"), "the bookkeeper's word of it")
        assert made.try_store(chain("q", 1)[0]) == "no_room"
        assert state_of(root) == before


def test_a_store_under_way_makes_nothing_in_a_strangers_directory(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 1))
        ticket = until(lambda: made.tier.reserve(chain("q", 1)[0]), "room")
        replace_with_strangers(made)
        before = state_of(root)
        worker = made.workers[0]
        worker.submit_store(ticket, worker.begin_store(ticket))
        results = []
        until(lambda: results.extend(worker.poll()[0]) or results)
        made.tier.abort(ticket.ticket)
        assert results[0].reason == "io_error"
        assert state_of(root) == before


def test_a_root_that_lost_its_marker_gets_it_back_while_it_serves(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        forget_marker(tmp_path / "root")
        until(lambda: (tmp_path / "root" / MARKER).exists())
        made.store_at_last(chain("q", 1)[0])
        made.recovered()
        until(lambda: made.tier.advance() or made.has(chain("p", 1)[0]))


def test_nothing_is_made_where_no_marker_is(tmp_path):
    root = tmp_path / "root"
    with pytest.raises(FileNotFoundError, match="removed or replaced"):
        require_marker(str(tmp_path))
    with tier_pair(root) as made:
        made.store(chain("p", 1))
        replace_with_strangers(made)
        until(lambda: made.try_store(chain("r", 1)[0]) == "no_room", "the end of its room")
        assert [path.name for path in root.iterdir()] == ["main.c"]
    assert (root / "main.c").read_text() == "int main;"


# Temporaries.


@pytest.mark.parametrize("name", [".tmp.foo", ".tmp.", ".tmp.0a1b2c3d.12.34", ".tmp.0a1b2c3d.12.34.5.bak"])
def test_a_strangers_temporary_stays_at_a_start_and_under_want_of_room(tmp_path, name):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 2))
    theirs = [root / name, root / NAMESPACE.attention / name, made.path(chain("p", 2)[0]).parent / name]
    for path in theirs:
        path.write_text("mine")
        os.utime(path, (1, 1))
    with tier_pair(root) as again:
        again.store(chain("q", 1))
    with tier_pair(root, namespace=OTHER_NAMESPACE, capacity_bytes=3 * on_disk()) as newcomer:
        newcomer.store(chain("r", 1)[:1])  # all of the idle namespace has to go for it
    assert not made.path(chain("p", 2)[0]).exists()
    assert [path.read_text() for path in theirs] == ["mine"] * 3


def test_a_namespace_that_goes_leaves_strangers_in_its_directories(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root, namespace=OTHER_NAMESPACE) as other:
        other.store(chain("q", 2))
    path = other.path(chain("q", 2)[0])
    theirs = [root / OTHER_NAMESPACE.attention / "mine", path.parent / "notes.txt"]
    theirs[0].mkdir()
    theirs[1].write_text("mine")
    with tier_pair(root, capacity_bytes=3 * on_disk()) as made:
        made.store(chain("p", 1)[:1])
        until(lambda: not path.exists())
        until(lambda: made.tier.advance() or not (root / OTHER_NAMESPACE.snapshot).exists())
    assert all(path.exists() for path in theirs)


def test_strangers_files_do_not_count(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 1))
    (made.path(chain("p", 1)[0]).parent / "notes.txt").write_bytes(bytes(10_000))
    lose_catalogue(root)
    with tier_pair(root) as made:
        made.recovered()
        assert counted(root)[0] == 2 * on_disk()
