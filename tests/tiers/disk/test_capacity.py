# SPDX-License-Identifier: Apache-2.0
"""Room and eviction: one capacity for all processes, and a catalogue that agrees with the files."""

import ast
import contextlib
import errno
import itertools
import os
import sqlite3
import time

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import expect_stores, put_device, room_bytes
from tests.tiers.disk.objects import chain
from tests.tiers.disk.processes import kill, start
from tests.tiers.disk.tier_pair import store_many, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.disk.catalogue import CatalogueError


def test_what_is_held_above_its_part_goes_back_when_others_join_though_nothing_is_stored(tmp_path):
    part = 16 * on_disk()
    capacity = 32 * 2 * part  # all together may hold a 32nd
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as idle:
        until(lambda: room_bytes(idle.tier) == 2 * part, "room for one alone")
        with tier_pair(tmp_path / "root", capacity_bytes=capacity) as other:
            until(lambda: room_bytes(other.tier) == part, "room for one of two")
            until(lambda: room_bytes(idle.tier) == part, "room that goes back")


@pytest.mark.parametrize(("step", "held"), [(1, 4), (6, 12), (40, 16)])
def test_the_stores_of_two_steps_find_room_at_once_as_far_as_an_8th_of_the_capacity_goes(
    tmp_path, step: int, held: int
):
    capacity = 32 * 4 * on_disk()
    with tier_pair(tmp_path / "root", capacity_bytes=capacity, step_bytes=step * on_disk()) as made:
        until(lambda: room_bytes(made.tier) == held * on_disk(), "all room for what is under way")
        assert [made.tier.reserve(planned) is not None for planned in chain("long", held)] == [True] * held + [False]


HOLDER = """
import sys
from pathlib import Path
from tests.tiers.disk.inside import room_bytes
from tests.tiers.disk.tier_pair import TierPair
from tests.waiting import until
made = TierPair(Path(sys.argv[1]), capacity_bytes=int(sys.argv[2])).recovered()
until(lambda: room_bytes(made.tier))
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_room_of_a_dead_process_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_overlay.tiers.disk.recovery.recovery.PAUSE_S", 0.3)
    root = tmp_path / "root"
    capacity = 6 * on_disk()  # each holds two objects' bytes
    holders = [start(HOLDER, root, capacity) for _ in range(3)]
    assert counted(root) == (0, capacity)
    with tier_pair(root, capacity_bytes=capacity) as made:
        made.recovered()
        assert made.try_store(chain("p", 1)[0]) == "no_room"
        kill(holders[0])
        made.store(chain("p", 1)[:1])
        for holder in holders[1:]:
            kill(holder)
        until(lambda: counted(root)[1] == 2 * on_disk())
        for name in "qrstuv":
            made.store(chain(name, 1)[:1])
        until(lambda: counted(root) == (4 * on_disk(), 2 * on_disk()))
        assert bytes_under(root) <= capacity


def test_the_capacity_holds_when_twenty_times_as_much_is_stored(tmp_path):
    capacity = 15 * on_disk()
    seen = []
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        store_many(made, 100, lambda: seen.append(bytes_under(made.root)))
        usage = made.settled().tier.usage()
        assert usage.evicted_objects >= 280
        held = [planned for turn in range(100) for planned in chain(f"many-{turn}", 2) if made.has(planned)]
        assert made.has(chain("many-99", 2)[2])
        assert made.tier.index.was_evicted(chain("many-50", 2)[0].object_id)
        assert not made.tier.index.was_evicted(chain("never", 2)[0].object_id)
        assert made.reasons(held) == [""] * len(held)
    assert max(seen) <= capacity
    assert max(seen) >= capacity // 2


def test_the_capacity_holds_across_restarts_and_when_it_is_lowered(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root, capacity_bytes=40 * on_disk()) as made:
        store_many(made, 20, lambda: None)
    lower = 12 * on_disk()
    with tier_pair(root, capacity_bytes=lower) as again:
        again.recovered()
        until(lambda: again.tier.advance() or bytes_under(root) <= lower)
        seen = []
        store_many(again, 20, lambda: seen.append(bytes_under(root)), "later")
        assert max(seen) <= lower
        until(lambda: again.tier.advance() or counted(root)[0] == bytes_under(root))


SHARER = """
import itertools, sys
from collections import Counter
from pathlib import Path
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, TierPair
namespace = OTHER_NAMESPACE if sys.argv[3] == "other" else NAMESPACE
made = TierPair(Path(sys.argv[1]), namespace=namespace, capacity_bytes=int(sys.argv[2]))
print("ready", flush=True)
reasons = Counter()
held = []
for turn in itertools.count():
    objects = chain(f"{sys.argv[3]}-{turn % 45}", 2)
    # A parent may go while its child waits for room: then the child is given up, as the connector does.
    reasons.update(made.outcome(planned) for planned in objects)
    held = [planned for planned in held[-9:] + objects if made.has(planned)]
    for planned, reason in zip(held, made.reasons(held)):  # compares the bytes
        reasons[f"load {reason}"] += 1
        if reason:
            made.tier.drop(planned.object_id)
    if reasons[""] >= 180:
        break
made.close()
print(dict(reasons), flush=True)
"""


def test_three_processes_keep_one_capacity_and_what_they_read_is_right(tmp_path):
    """Two in one namespace, so that each evicts what the other stores too; 20 times the limit is stored."""
    root, capacity = tmp_path / "root", 26 * on_disk()
    sharers = [start(SHARER, root, capacity, name) for name in ("x", "y", "other")]
    seen = []
    try:
        while any(sharer.poll() is None for sharer in sharers):
            seen.append(bytes_under(root))
            time.sleep(0.001)
        ended = [ast.literal_eval(sharer.stdout.readline()) for sharer in sharers]
    finally:
        for sharer in sharers:
            kill(sharer)
    assert max(seen) <= capacity
    assert max(seen) >= capacity // 2
    assert set().union(*ended) <= {"", "there", "no_parent", "load ", "load missing"}


def test_aborted_and_failed_stores_give_their_room_back(tmp_path):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device, capacity_bytes=8 * on_disk()) as made:
        made.recovered()
        device.faults["pwritev"] = errno.EIO
        for turn in range(15):
            assert made.outcome(chain(f"bad-{turn}", 1)[0]) == "io_error"
        device.faults.clear()
        made.store(chain("p", 3))
        assert made.reasons(chain("p", 3)) == [""] * 4
        until(lambda: counted(made.root)[0] == bytes_under(made.root))


def test_what_one_rank_could_not_store_is_removed_in_the_others(tmp_path):
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.store(chain("p", 1))
        put_device(made.workers[1], FailingDevice(pwritev=errno.EIO))
        assert made.outcome(chain("q", 1)[0]) == "io_error"
        until(lambda: len(object_files(made.root)) == 4)
        until(lambda: counted(made.root)[0] == 4 * on_disk())


@pytest.mark.parametrize("damage", ["garbage", "cut", "removed", "foreign"])
def test_a_damaged_or_removed_catalogue_is_made_anew_while_it_serves(tmp_path, damage):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 2))
        until(lambda: counted(root)[0] == 3 * on_disk())
        (catalogue,) = root.glob("catalogue-*.sqlite")
        if damage == "removed":
            catalogue.unlink()
        elif damage == "cut":
            os.truncate(catalogue, 5000)
        else:
            catalogue.with_name("other").write_bytes(b"garbage" * 1000)
            if damage == "foreign":
                catalogue.with_name("other").unlink()
                sqlite3.connect(catalogue.with_name("other")).executescript(
                    "CREATE TABLE meta (id); PRAGMA user_version = 1"
                )
            os.replace(catalogue.with_name("other"), catalogue)
        for planned in chain("q", 2):
            made.store_at_last(planned)

        def agrees():
            try:
                return counted(root)[0] == bytes_under(root)
            except CatalogueError:  # what was damaged is still in its place
                return False

        until(agrees)
        until(lambda: made.tier.advance() or not made.tier.is_recovering)
        assert made.coverage(chain("p", 2)) == [True] * 3
        for planned in chain("q", 2):  # one may have been on its way when the catalogue went
            assert made.has(planned) or made.outcome(planned) == ""
        assert made.reasons([*chain("p", 2), *chain("q", 2)]) == [""] * 6
        until(lambda: counted(root)[0] == bytes_under(root) == 6 * on_disk())


def test_close_gives_the_room_back(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        until(lambda: counted(made.root)[1] > 0)
    assert counted(made.root) == (3 * on_disk(), 0)


@pytest.mark.parametrize("num_engines", [1, 8])
def test_engines_of_one_root_use_nearly_all_of_the_capacity(tmp_path, num_engines: int):
    capacity = 400 * on_disk()
    with contextlib.ExitStack() as closing:
        engines = [
            closing.enter_context(tier_pair(tmp_path / "root", capacity_bytes=capacity)) for _ in range(num_engines)
        ]
        most, turns = 0, itertools.count()
        while not any(made.tier.usage().evicted_objects for made in engines):
            for place, made in enumerate(engines):
                for turn in itertools.islice(turns, 8):
                    made.store(chain(f"{place} {turn}", 1)[:1])
            most = max(most, bytes_under(tmp_path / "root"))
        most = max(most, bytes_under(tmp_path / "root"))
    assert 0.95 * capacity < most <= capacity


def test_engines_that_are_started_one_after_another_use_nearly_all_of_the_capacity(tmp_path):
    """An idle one gives back what was its part when there were fewer."""
    capacity = 1000 * on_disk(1)  # 16 times two objects are for what is under way
    with contextlib.ExitStack() as closing:
        for place in range(16):
            made = closing.enter_context(tier_pair(tmp_path / "root", capacity_bytes=capacity, max_object_bytes=1))
            made.store(chain(f"{place}", 10, 1))
        most, turns = 0, itertools.count()
        while not made.tier.usage().evicted_objects:
            made.store(chain(f"last {next(turns)}", 10, 1))
            most = max(most, bytes_under(tmp_path / "root"))
    assert 0.95 * capacity < most <= capacity


SHORT_LIVES = """
import os, signal, sys
from pathlib import Path
from tests.tiers.disk.inside import expect_stores, room_bytes
from tests.tiers.disk.tier_pair import TierPair
from tests.waiting import until
for life in range(int(sys.argv[3])):
    if not os.fork():
        made = TierPair(Path(sys.argv[1]), capacity_bytes=int(sys.argv[2])).recovered()
        expect_stores(made.tier)
        until(lambda: room_bytes(made.tier) > 0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
print("ready", flush=True)
"""


def test_twenty_lives_of_a_moment_that_are_killed_cost_no_object(tmp_path):
    """What the dead held is there before anything is evicted for what a request may store."""
    root, capacity = tmp_path / "root", 128 * on_disk()
    with tier_pair(root, capacity_bytes=capacity) as made:
        store_many(made, 41, lambda: None)  # three objects each: what is left of 128 is what one life may hold
    files = object_files(root)
    kill(start(SHORT_LIVES, root, capacity, 20))
    with tier_pair(root, capacity_bytes=capacity) as again:
        again.recovered()
        expect_stores(again.tier)
        until(lambda: room_bytes(again.tier) > 0, "room")
        assert again.settled().tier.usage().evicted_objects == 0
        assert object_files(root) == files
        again.store(chain("p", 1))


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_clock_that_is_set_back_makes_nothing_old_that_is_stored_afterwards(tmp_path, monkeypatch, is_started_again):
    capacity, real = 60 * on_disk(), time.time
    with contextlib.ExitStack() as closing:
        made = closing.enter_context(tier_pair(tmp_path / "root", capacity_bytes=capacity))
        store_many(made, 25, lambda: None)
        monkeypatch.setattr("time.time", lambda: real() - 3600)
        if is_started_again:
            closing.close()
            made = closing.enter_context(tier_pair(tmp_path / "root", capacity_bytes=capacity)).recovered()
        found = []
        for turn in range(55):
            made.store(chain(f"late-{turn}", 2))
            if turn >= 5:
                found.append(all(made.settled().coverage(chain(f"late-{turn - 5}", 2))))
    assert found == [True] * 50


def test_a_clock_that_is_set_forward_makes_nothing_old_that_an_older_engine_stores_afterwards(tmp_path, monkeypatch):
    capacity, real = 60 * on_disk(), time.time
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        made.recovered()
        monkeypatch.setattr("time.time", lambda: real() + 3600)
        with tier_pair(tmp_path / "root", capacity_bytes=capacity) as newer:
            store_many(newer.recovered(), 25, lambda: None)
            found = []
            for turn in range(20):
                made.store(chain(f"late-{turn}", 2))
                if turn >= 5:
                    found.append(all(made.settled().coverage(chain(f"late-{turn - 5}", 2))))
    assert found == [True] * 15


@pytest.mark.parametrize("use", ["loaded", "used from elsewhere"])
def test_what_is_used_stays_when_its_engine_was_started_again(tmp_path, use: str, monkeypatch):
    real, ahead_s = time.monotonic, [0]
    monkeypatch.setattr("time.monotonic", lambda: real() + ahead_s[0])
    capacity = 60 * on_disk()
    used = chain("used", 2)
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        made.store(used)
        for turn in range(10):
            made.store(chain(f"unused {turn}", 2))
        made.settled()
        ahead_s[0] = 2  # recency is kept in seconds
        if use == "loaded":
            made.tier.release(made.tier.acquire(used))
        else:  # the last chunk and the snapshot; what the tier does not have is no error
            made.tier.touch([planned.object_id for planned in (*used[1:], *chain("never stored", 1))])
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as again:
        again.recovered()
        for turn in range(12):
            again.store(chain(f"new {turn}", 2))
        assert again.settled().coverage(used) == [True] * 3
        assert again.reasons(used) == [""] * 3
        assert not all(again.coverage(chain("unused 0", 2)))


def test_the_least_capacity_holds_an_object(tmp_path):
    with tier_pair(tmp_path / "root", capacity_bytes=2 * on_disk()) as made:
        for name in "pq":
            made.store(chain(name, 1)[:1])
            assert made.settled().has(chain(name, 1)[0])
