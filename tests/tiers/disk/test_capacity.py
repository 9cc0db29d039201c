# SPDX-License-Identifier: Apache-2.0
"""Room and eviction: one capacity for all processes, and a ledger that agrees with the files."""

import ast
import errno
import os
import threading
import time

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import bytes_of_objects, bytes_under, ledger_of, object_files, on_disk
from tests.tiers.disk.inside import lease_bytes, put_device
from tests.tiers.disk.objects import chain
from tests.tiers.disk.processes import WRITER, kill, start
from tests.tiers.disk.tier_pair import OTHER_NAMESPACE, store_many, tier_pair
from tests.tiers.disk.waiting import until
from vllm_overlay.tiers.disk.device import Device


def test_a_count_that_cannot_be_made_now_is_made_later(tmp_path, monkeypatch):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 5))
    scandir, fails = os.scandir, [True]

    def short(path: str):
        if fails and len(os.path.basename(path)) == 2 and threading.current_thread().name == "disk-reclaimer":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(path)

    monkeypatch.setattr("os.scandir", short)
    (made.root / "ledger").unlink()
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        assert again.try_store(chain("q", 1)[0]) == "no_room"
        fails.clear()
        until(lambda: ledger_of(again.root)[0] == 6 * on_disk())


def test_the_lease_of_a_dead_process_comes_back(tmp_path):
    root = tmp_path / "root"
    capacity = 6 * on_disk()
    source = """
import sys, time
from pathlib import Path
from tests.tiers.disk.inside import lease_bytes
from tests.tiers.disk.tier_pair import TierPair
from tests.tiers.disk.waiting import until
made = TierPair(Path(sys.argv[1]), capacity_bytes=int(sys.argv[2])).recovered()
until(lambda: lease_bytes(made.tier))
print("ready", flush=True)
time.sleep(600)
"""
    holders = [start(source, root, capacity) for _ in range(3)]
    assert ledger_of(root) == (0, capacity)
    with tier_pair(root, capacity_bytes=capacity) as made:
        made.recovered()
        assert made.try_store(chain("p", 1)[0]) == "no_room"
        kill(holders[0])
        made.store(chain("p", 1))
        for holder in holders[1:]:
            kill(holder)
        made.store(chain("q", 3))
        until(lambda: ledger_of(root) == (4 * on_disk(), 2 * on_disk()))
        assert bytes_under(root) == 4 * on_disk()


def test_the_capacity_holds_when_twenty_times_as_much_is_stored(tmp_path):
    capacity = 15 * on_disk()
    seen = []
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        store_many(made, 100, lambda: seen.append(bytes_under(made.root)))
        usage = made.tier.usage()
        assert usage.evicted_objects >= 280
        held = [planned for turn in range(100) for planned in chain(f"many-{turn}", 2) if made.has(planned)]
        assert made.has(chain("many-99", 2)[2])
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
        store_many(again, 20, lambda: seen.append(bytes_under(root)))
        assert max(seen) <= lower
        until(lambda: ledger_of(root)[0] == bytes_of_objects(root))


def test_two_processes_keep_one_capacity(tmp_path):
    root = tmp_path / "root"
    capacity = 20 * on_disk()
    source = WRITER.replace("TierPair(Path(sys.argv[1]))", f"TierPair(Path(sys.argv[1]), capacity_bytes={capacity})")
    writer = start(source, root, "w")
    seen = []
    try:
        with tier_pair(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as made:
            store_many(made, 100, lambda: seen.append(bytes_under(root)))
            assert writer.poll() is None
    finally:
        kill(writer)
    assert max(seen) <= capacity
    assert max(seen) >= capacity // 2


SHARER = """
import itertools, sys, time
from collections import Counter
from pathlib import Path
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import TierPair
from tests.tiers.disk.waiting import until
made = TierPair(Path(sys.argv[1]), capacity_bytes=int(sys.argv[2]))
print("ready", flush=True)
reasons = Counter()

def store(planned):
    # A parent may go while its child waits for room: then the child is given up, as the connector does.
    if made.has(planned):
        return "there"
    while all(made.tier.index.has(parent) for parent in planned.parents):
        if (reason := made.try_store(planned)) != "no_room":
            return reason
        time.sleep(0.001)
    return "no parent"

held = []
for turn in itertools.count():
    objects = chain(f"{sys.argv[3]}-{turn % 45}", 2)
    reasons.update(store(planned) for planned in objects)
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
    """In one namespace, so that each evicts what the others store too; 20 times the limit is stored."""
    root, capacity = tmp_path / "root", 26 * on_disk()
    sharers = [start(SHARER, root, capacity, name) for name in "xyz"]
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
    assert set().union(*ended) <= {"", "there", "no parent", "load ", "load missing"}


def test_two_processes_that_store_the_same_objects_count_them_once(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as one, tier_pair(root) as two:
        one.recovered()
        two.recovered()
        one.store(chain("p", 4))
        two.store(chain("p", 4))
        assert ledger_of(root)[0] == bytes_under(root) == 5 * on_disk()
        two.tier.drop(chain("p", 4)[0].object_id)
        until(lambda: object_files(root) == [])
        until(lambda: ledger_of(root)[0] == 0)
        assert one.reasons(chain("p", 4)) == ["missing"] * 5


def test_nothing_is_written_below_the_free_space_to_keep(tmp_path):
    class Filling(Device):
        free = 1 << 40

        def free_bytes(self, path: str) -> int:
            return self.free

    device = Filling()
    with tier_pair(tmp_path / "root", device=device, min_free_bytes="1 GiB") as made:
        made.store(chain("p", 3))
        device.free = 1 << 20
        until(lambda: lease_bytes(made.tier) == 0)
        assert made.try_store(chain("q", 1)[0]) == "no_room"
        device.free = 1 << 40
        made.store(chain("q", 1))


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
        until(lambda: ledger_of(made.root)[0] == bytes_under(made.root))


def test_what_one_rank_could_not_store_is_removed_in_the_others(tmp_path):
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.store(chain("p", 1))
        put_device(made.workers[1], FailingDevice(pwritev=errno.EIO))
        assert made.outcome(chain("q", 1)[0]) == "io_error"
        until(lambda: len(object_files(made.root)) == 4)
        until(lambda: ledger_of(made.root)[0] == 4 * on_disk())


def test_a_damaged_or_removed_ledger_is_counted_anew(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 2))
        (root / "ledger").write_bytes(b"garbage")
        for planned in chain("q", 2):
            made.store_at_last(planned)
        until(lambda: ledger_of(root)[0] == bytes_under(root) == 6 * on_disk())
        (root / "ledger").unlink()
        for planned in chain("r", 2):
            made.store_at_last(planned)
        until(lambda: ledger_of(root)[0] == bytes_under(root) == 9 * on_disk())


def test_bad_files_come_off_the_ledger(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 2)
        made.store(objects)
        os.truncate(made.path(objects[1]), 4096)
        assert made.reasons(objects[1:2]) == ["size"]
        made.tier.drop(objects[1].object_id)
        until(lambda: object_files(made.root) == [made.path(objects[0])])


def test_close_gives_the_lease_back(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        assert ledger_of(made.root)[1] > 0
    assert ledger_of(made.root) == (3 * on_disk(), 0)
