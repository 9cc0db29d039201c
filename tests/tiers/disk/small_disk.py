# SPDX-License-Identifier: Apache-2.0
"""The tier's two halves on a real small disk. Run by test_small_disk.py, in a mount namespace of its own."""

import contextlib
import sqlite3

import pytest

from tests.mounts import SmallDisk
from tests.tiers.disk.files import bytes_under, counted, on_disk
from tests.tiers.disk.objects import chain
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.tier_pair import tier_pair
from tests.waiting import until
from vllm_overlay.common import circuit_breaker, rate_limited_log
from vllm_overlay.tiers.disk import bookkeeper
from vllm_overlay.tiers.disk.catalogue.generations import newest, path_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import open_root

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Below the root of each test; whoever fails is tried again soon."""
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(bookkeeper, "TICK_S", 0.05)
    monkeypatch.setattr(rate_limited_log, "INTERVAL_S", 0.0)
    (tmp_path / "root").mkdir(mode=0o700)
    return SmallDisk(tmp_path / "root")


def outcomes_until(made, wanted):
    """What stores came to, one after another, until one came to ``wanted``."""
    outcomes = []

    def store():
        outcomes.append(made.try_store(chain(f"tried {len(outcomes)}", 1)[0]))
        return outcomes[-1] == wanted

    until(store, wanted)
    return outcomes


def assert_all_is_well(made, may_lack=False):
    """Stores go on, what is stored is loaded, and the catalogue, the files and the index agree. ``may_lack``: files
    went before their rows, which go with the next eviction, and are misses until then."""
    made.recovered()
    for planned in chain("well", 1):
        until(lambda planned=planned: made.has(planned) or made.try_store(planned) == "", "a store that succeeds")
    until(lambda: made.reasons(chain("well", 1)) == ["", ""], "a load that succeeds")
    until(lambda: made.tier.advance() or all_agree(made, may_lack), "an agreement of catalogue, files and index")


def all_agree(made, may_lack=False):
    with contextlib.suppress(FileNotFoundError):  # one goes just now
        there, known = bytes_under(made.root), made.tier.index.used_bytes
        return counted(made.root)[0] == known and (there <= known if may_lack else there == known)
    return False


def test_a_disk_that_others_keep_full_drops_stores_and_is_given_up_to_them(disk, monkeypatch):
    monkeypatch.setattr(bookkeeper, "TICK_S", 60.0)  # so that the bookkeeper does not see it before a store does
    disk.mount("16m")
    with tier_pair(disk.path, capacity_bytes=64 * MIB, max_object_bytes=MIB, staging_bytes=4 * MIB) as made:
        made.store(chain("p", 10))
        made.settled()
        with disk.full():
            outcomes = outcomes_until(made, "no_room")
            assert outcomes[0] == "no_space"
            # "": what an eviction has freed may be ours before it is the others'.
            assert set(outcomes[1:-1]) <= {"no_space", "breaker", ""}
            until(lambda: made.tier.advance() or made.tier.usage().evicted_objects, "an eviction")
            assert set(made.reasons(chain("p", 10))) <= {"", "missing"}
            monkeypatch.setattr(bookkeeper, "TICK_S", 0.05)
        assert_all_is_well(made, may_lack=True)


def test_at_capacity_on_a_disk_that_others_fill_to_the_last_byte_files_go_before_their_rows(disk, caplog):
    assert_files_go_before_their_rows(disk, caplog, is_ended=False)


def test_whose_rows_stayed_on_a_full_disk_is_forgotten_after_a_restart(disk, caplog):
    assert_files_go_before_their_rows(disk, caplog, is_ended=True)


def assert_files_go_before_their_rows(disk, caplog, is_ended):
    """The catalogue cannot be written then, and would have to be for an eviction."""
    disk.mount("16m")
    capacity = 20 * on_disk()
    with contextlib.ExitStack() as others:
        with tier_pair(disk.path, capacity_bytes=capacity) as made:
            made.recovered()
            for turn in range(5):
                made.store(chain(f"p{turn}", 6))
            until(lambda: made.tier.advance() or all_agree(made), "an agreement of catalogue, files and index")
            before = bytes_under(made.root)
            evicted = made.tier.usage().evicted_objects
            cut_log(made.root)
            others.enter_context(disk.full())
            until(lambda: made.try_store(chain("q", 1)[0]) and bytes_under(made.root) < before, "files that go")
            until(lambda: "so that the catalogue can be written" in caplog.text, "the log's word")
            assert made.tier.usage().evicted_objects > evicted
            if not is_ended:
                others.close()
                assert_all_is_well(made, may_lack=True)
        others.close()
    with tier_pair(disk.path, capacity_bytes=capacity) as again:
        assert_all_is_well(again, may_lack=True)
        assert bytes_under(again.root) <= capacity
    assert [sentence for sentence in problems(disk.path, capacity) if "No such file" not in sentence] == []


def cut_log(root):
    """The catalogue's log has no room of its own left."""
    with contextlib.closing(sqlite3.connect(path_of(str(root), newest(str(root))))) as db:
        until(lambda: not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0], "a log that is cut")


def test_a_disk_that_is_full_at_the_first_start_is_used_once_it_has_room(disk, caplog):
    disk.mount("16m")
    assert_used_once_there_is_room(disk, disk.path / "vllm-kv", caplog)


def test_a_disk_that_is_full_at_the_start_is_used_once_it_has_room(disk, caplog):
    disk.mount("16m")
    open_root(Device(), str(disk.path))
    assert_used_once_there_is_room(disk, disk.path, caplog)


def assert_used_once_there_is_room(disk, root, caplog):
    """From a start while others fill the disk."""
    with contextlib.ExitStack() as others:
        others.enter_context(disk.full())
        with tier_pair(root) as made:
            until(lambda: sum("has to wait" in message for message in caplog.messages) > 3)
            assert made.try_store(chain("p", 1)[0]) == "no_room"
            others.close()
            assert_all_is_well(made)
            assert len(list(made.root.glob("*/alive"))) == 1


def test_a_disk_that_takes_no_more_files_has_no_room(disk):
    disk.mount("16m", max_files=400)
    with tier_pair(disk.path, capacity_bytes=64 * MIB) as made:
        made.store(chain("p", 3))
        with disk.out_of_files():
            # A store meets the kernel's error, unless the bookkeeper has looked first. "": it took the file that an
            # eviction has freed before the others did.
            assert set(outcomes_until(made, "no_room")) <= {"no_space", "no_room", ""}
            assert set(made.reasons(chain("p", 3))) <= {"", "missing"}
        assert_all_is_well(made)


def test_own_files_that_are_too_many_make_room_for_new_ones(disk):
    disk.mount("16m", max_files=100)
    with tier_pair(disk.path, capacity_bytes=64 * MIB) as made:
        for turn in range(400):
            made.store_at_last(chain(f"p{turn}", 1)[0])
        assert made.tier.usage().evicted_objects > 0
        assert_all_is_well(made)


def test_a_disk_that_turns_read_only_is_read_and_its_writes_left_alone(disk):
    disk.mount("16m")
    with tier_pair(disk.path, capacity_bytes=64 * MIB, max_object_bytes=MIB, staging_bytes=4 * MIB) as made:
        made.store(chain("p", 3))
        with disk.read_only():
            assert set(outcomes_until(made, "breaker")) == {"io_error", "breaker"}
            assert made.reasons(chain("p", 3)) == [""] * 4
        assert_all_is_well(made)
        assert made.reasons(chain("p", 3)) == [""] * 4


def test_a_disk_that_is_unmounted_is_gone_until_it_is_back_and_nothing_is_written_beneath(disk):
    disk.mount("16m")
    with tier_pair(disk.path) as made:
        made.store(chain("p", 3))
        made.settled()
        with disk.gone():
            assert made.reasons(chain("p", 3)) == ["missing"] * 4
            for turn in range(5):
                assert made.turned().try_store(chain(f"q{turn}", 1)[0]) != ""
            assert list(made.root.iterdir()) == []
        until(lambda: made.tier.advance() or all(made.coverage(chain("p", 3))), "what was stored before")
        assert made.reasons(chain("p", 3)) == [""] * 4
        assert_all_is_well(made)


def test_the_free_space_to_keep_is_kept_but_for_what_the_catalogue_takes(disk):
    disk.mount("16m")
    keep = 8 * MIB
    with disk.sampled() as samples, tier_pair(disk.path, capacity_bytes=64 * MIB, min_free_bytes=keep) as made:
        for turn in range(20):
            made.store(chain(f"p{turn}", 20))
        assert made.tier.usage().evicted_objects > 0
        assert made.reasons(chain("p19", 20)) == [""] * 21
        assert_all_is_well(made)
    assert keep - MIB <= min(samples) < keep + MIB


def test_a_disk_smaller_than_the_capacity_is_filled_and_no_more_is_evicted_than_needed(disk):
    disk.mount("16m")
    with tier_pair(disk.path, capacity_bytes=4096 * MIB) as made:
        objects = chain("p", 16 * MIB // on_disk() * 3 // 4)
        made.store(objects)
        assert made.tier.usage().evicted_objects == 0
        for turn in range(10):  # the file system may be full before it says so; then the rest of a prompt is given up
            assert {made.outcome(planned) for planned in chain(f"q{turn}", 20)} <= {"", "no_space", "no_parent"}
        assert bytes_under(made.root) > 11 * MIB  # and the catalogue has its part
        assert_all_is_well(made, may_lack=True)  # its log may grow while somebody reads, until it cannot be written
