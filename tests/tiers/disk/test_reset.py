# SPDX-License-Identifier: Apache-2.0
"""After a reset the weights may be others: nothing stored before is loaded, and nobody else loads what comes after."""

import threading

import pytest

from tests.tiers.disk.files import counted, lose_catalogue, object_files, on_disk
from tests.tiers.disk.inside import is_removing, reset_name
from tests.tiers.disk.objects import OBJECT, bytes_of, chain, content, fill
from tests.tiers.disk.processes import kill, start
from tests.tiers.disk.reset import is_serving_another, store_after_reset
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair, close_tier, settings, tier_pair
from tests.waiting import PATIENCE_S, until
from vllm_overlay.tiers.base import LoadTicket
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.namespace import DESCRIPTION
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.tickets import DiskLoad


def namespaces(root):
    """The directories that hold objects."""
    return {path.parents[1].name for path in object_files(root)}


def load(made: TierPair, planned):
    """The bytes that the tier has for the object."""
    (ticket,) = made.tier.acquire([planned])
    worker = made.workers[0]
    worker.begin_load("one", [ticket])
    results = []
    until(lambda: results.extend(worker.poll()[1]) or results)
    data = None if results[0].buffer is None else bytes_of(results[0].buffer).copy()
    if data is not None:
        worker.end_fetch("one", 0)
    made.tier.release([planned.object_id])
    return data


def test_what_was_stored_before_is_not_found_and_the_same_name_gets_new_bytes(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 2)
        made.store(objects)
        made.tier.clear()
        assert made.coverage(objects) == [False] * 3
        assert made.tier.acquire(objects) is None
        other = 255 - content(objects[0], 0)
        store_after_reset(made, objects[0], other)
        assert (load(made, objects[0]) == other).all()
        assert len(namespaces(made.root)) == 3
        assert made.path(objects[0]).exists()


def test_other_processes_keep_what_they_have_and_do_not_see_what_comes(tmp_path):
    with tier_pair(tmp_path / "root") as made, tier_pair(tmp_path / "root") as other:
        objects = chain("p", 2)
        made.store(objects)
        other.recovered()
        other.store(chain("q", 2))
        made.tier.clear()
        store_after_reset(made, objects[0])
        assert other.reasons([*objects, *chain("q", 2)]) == [""] * 6
        with tier_pair(tmp_path / "root") as third:
            until(lambda: third.tier.advance() or len(third.tier.index) == 6)
            assert len(third.settled().tier.index) == 6


class GatedWrites(Device):
    """Objects are written when the test says so."""

    def __init__(self):
        self.go_on = threading.Event()
        self.go_on.set()

    def pwritev(self, fd, segments, offset):
        assert self.go_on.wait(PATIENCE_S)
        return super().pwritev(fd, segments, offset)


def test_a_store_under_way_goes_where_it_was_promised_and_is_not_found(tmp_path):
    device = GatedWrites()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("before", 1))
        planned = chain("p", 1)[0]
        ticket = made.tier.reserve(planned)
        buffer = made.workers[0].begin_store(ticket)
        fill(buffer, content(planned, 0))
        device.go_on.clear()
        made.workers[0].submit_store(ticket, buffer)
        made.tier.clear()
        device.go_on.set()
        results = []
        until(lambda: results.extend(made.workers[0].poll()[0]) or results)
        assert made.path(planned).exists()
        assert len(namespaces(made.root)) == 2
        made.tier.commit(ticket.ticket)
        assert not made.has(planned)
        until(lambda: made.tier.advance() or not is_removing(made.tier, planned.object_id))
        store_after_reset(made, planned)
        assert made.has(planned)


def test_a_load_under_way_reads_what_it_was_promised(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        planned = chain("p", 1)[0]
        made.store([planned])
        (ticket,) = made.tier.acquire([planned])
        made.tier.clear()
        assert ticket.part.reset == ""
        assert made.reasons([planned]) == [""]
        made.workers[0].begin_load("new", [LoadTicket(0, planned.object_id, OBJECT, DiskLoad(reset_name(made.tier)))])
        results = []
        until(lambda: results.extend(made.workers[0].poll()[1]) or results)
        assert results[0].reason == "missing"
        made.tier.release([planned.object_id])


def test_a_restart_finds_what_was_stored_before_the_reset_and_nothing_of_after(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        made.tier.clear()
        until(lambda: is_serving_another(made))
        for planned in chain("p", 2)[:2]:
            store_after_reset(made, planned)
    assert namespaces(made.root) == set(NAMESPACE.fingerprints)  # what nobody finds again goes at the end
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(chain("p", 2)) == [True] * 3
        assert again.reasons(chain("p", 2)) == [""] * 3


STORE_AFTER_RESET = """
import sys
from pathlib import Path
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import TierPair
from tests.waiting import until
from tests.tiers.disk.reset import is_serving_another, store_after_reset
made = TierPair(Path(sys.argv[1])).recovered()
print("ready", flush=True)
made.store(chain("p", 1))
made.tier.clear()
until(lambda: is_serving_another(made))
store_after_reset(made, chain("p", 1)[0])
print("stored", flush=True)
sys.stdin.read()
"""


def kill_after_a_reset(root):
    """Leaves what a process stored before it was killed, some of it after a reset."""
    process = start(STORE_AFTER_RESET, root)
    try:
        assert process.stdout.readline() == "stored\n"
        with tier_pair(root) as made:
            made.store(chain("q", 1))
            assert len(namespaces(root)) == 3  # it is served
    finally:
        kill(process)


def test_what_a_killed_process_stored_after_a_reset_is_removed_by_the_next(tmp_path):
    root = tmp_path / "root"
    kill_after_a_reset(root)
    with tier_pair(root) as made:
        until(lambda: namespaces(root) == set(NAMESPACE.fingerprints))
        made.recovered()
        assert made.reasons([*chain("p", 1), *chain("q", 1)]) == [""] * 4
        until(lambda: counted(root)[0] == 4 * on_disk())


def test_what_does_not_say_that_a_reset_began_it_stays_until_room_is_needed(tmp_path):
    root = tmp_path / "root"
    kill_after_a_reset(root)
    (unnamed,) = namespaces(root) - set(NAMESPACE.fingerprints)
    for path in set(root.glob(f"*/{DESCRIPTION}")) - {root / name / DESCRIPTION for name in NAMESPACE.fingerprints}:
        path.unlink()  # its process was killed before it had written that
    lose_catalogue(root)
    with tier_pair(root, capacity_bytes=12 * on_disk()) as made:
        made.recovered()
        made.store(chain("r", 1))
        assert unnamed in namespaces(root)
        made.store(chain("s", 9))
        assert unnamed not in namespaces(root)


def test_each_reset_is_a_namespace_and_the_one_before_goes(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        for _ in range(3):
            made.tier.clear()
            until(lambda: is_serving_another(made))
            store_after_reset(made, chain("p", 1)[0])
        until(lambda: made.tier.advance() or len(namespaces(made.root)) == 3)
        words = [manifest_or_empty(str(made.root / name)).is_of_one_process for name in namespaces(made.root)]
        assert sorted(words) == [False, False, True]


def test_what_was_stored_before_goes_when_room_is_needed(tmp_path):
    with tier_pair(tmp_path / "root", capacity_bytes=12 * on_disk()) as made:
        made.store(chain("p", 8))
        kept = [made.path(planned) for planned in chain("p", 8)]
        made.tier.clear()
        for planned in chain("q", 8):
            store_after_reset(made, planned)
        assert sum(path.exists() for path in kept) <= 3
        assert made.coverage(chain("q", 8)) == [True] * 9


class SlowHeaders(Device):
    """Recovery's reads wait for the test."""

    def __init__(self):
        self.go_on = threading.Event()

    def preadv(self, fd, segments, offset):
        assert self.go_on.wait(PATIENCE_S)
        return super().preadv(fd, segments, offset)


@pytest.mark.parametrize("is_under_way", [False, True])
def test_what_recovery_finds_of_before_is_not_taken(tmp_path, is_under_way):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 3))
    device = SlowHeaders()
    tier = DiskTierManager(settings(tmp_path / "root"), NAMESPACE, 1, OBJECT, device)
    if not is_under_way:
        device.go_on.set()
        until(lambda: len(tier._served.updates) > 0)
    tier.clear()
    device.go_on.set()
    until(lambda: tier.advance() or not tier.is_recovering)
    assert len(tier.index) == 0
    assert len(object_files(made.root)) == 4
    close_tier(tier)


def test_a_clean_end_after_a_reset_gives_the_room_back(tmp_path, said):
    with tier_pair(tmp_path / "root") as made:
        made.tier.clear()
        until(lambda: is_serving_another(made))
        store_after_reset(made, chain("p", 1)[0])
    assert counted(tmp_path / "root") == (0, 0)
    assert said() == []
