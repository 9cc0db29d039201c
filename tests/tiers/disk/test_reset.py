# SPDX-License-Identifier: Apache-2.0
"""After a reset the weights may be others: nothing stored before is loaded, and nobody else loads what comes after."""

from contextlib import closing

import pytest

from tests.tiers.disk.devices import GatedDevice
from tests.tiers.disk.files import counted, lose_catalogue, object_files, on_disk
from tests.tiers.disk.inside import catalogue_of, is_serving_last, wanted_namespace
from tests.tiers.disk.objects import OBJECT, bytes_of, chain, content
from tests.tiers.disk.processes import kill, start
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair, close_tier, settings, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.base import LoadTicket
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.messages import DiskPart


def namespaces(root):
    """Objects by the fingerprint of their namespace."""
    with closing(Catalogue(str(root))) as catalogue:
        return {usage.fingerprint: usage.num_objects for usage in catalogue.usage() if usage.num_objects}


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
    made.tier.release([ticket])
    return data


def test_what_was_stored_before_is_not_found_and_the_same_name_gets_new_bytes(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 2)
        made.store(objects)
        made.tier.clear()
        assert made.coverage(objects) == [False] * 3
        assert made.tier.acquire(objects) is None
        other = 255 - content(objects[0], 0)
        made.store_at_last(objects[0], other)
        assert (load(made, objects[0]) == other).all()
        private = wanted_namespace(made.tier)
        expected = {NAMESPACE.fingerprint: 3, private.fingerprint: 1}
        until(lambda: namespaces(made.root) == expected, "two namespaces")
        assert private.is_private and len(object_files(made.root)) == 4


def test_other_processes_keep_what_they_have_and_do_not_see_what_comes(tmp_path):
    with tier_pair(tmp_path / "root") as made, tier_pair(tmp_path / "root") as other:
        objects = chain("p", 2)
        made.store(objects)
        other.recovered()
        other.store(chain("q", 2))
        made.tier.clear()
        made.store_at_last(objects[0])
        until(lambda: other.tier.advance() or all(other.coverage(objects)), "what was stored before")
        assert other.reasons([*objects, *chain("q", 2)]) == [""] * 6
        with tier_pair(tmp_path / "root") as third:
            until(lambda: third.tier.advance() or len(third.tier.index) == 6)
            assert len(third.settled().tier.index) == 6


def test_a_store_under_way_goes_where_it_was_promised_and_is_not_found(tmp_path):
    device = GatedDevice("pwritev")
    device.gate.set()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("before", 1))
        planned = chain("p", 1)[0]
        device.gate.clear()
        ticket = made.submit(made.tier.reserve(planned))
        made.tier.clear()
        device.gate.set()
        made.end_of_store()
        assert len(object_files(made.root)) == 3
        made.tier.commit(ticket.ticket)
        assert not made.has(planned)
        until(lambda: len(object_files(made.root)) == 2, "the end of a store that nobody wants")
        made.store_at_last(planned)
        assert made.has(planned)


def test_a_load_under_way_reads_what_it_was_promised(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        planned = chain("p", 1)[0]
        made.store([planned])
        (ticket,) = made.tier.acquire([planned])
        made.tier.clear()
        assert ticket.part.fingerprint == NAMESPACE.fingerprint
        assert made.reasons([planned]) == [""]
        part = DiskPart(ticket.part.file, wanted_namespace(made.tier).fingerprint)
        made.workers[0].begin_load("new", [LoadTicket(0, planned.object_id, OBJECT, part)])
        results = []
        until(lambda: results.extend(made.workers[0].poll()[1]) or results)
        assert results[0].reason == "header"  # a file of before is not one of now
        made.tier.release([ticket])


def test_a_restart_finds_what_was_stored_before_the_reset_and_nothing_of_after(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        made.tier.clear()
        until(lambda: is_serving_last(made.tier))
        for planned in chain("p", 2)[:2]:
            made.store_at_last(planned)
    assert sorted(namespaces(made.root).values()) == [2, 3]
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
from tests.tiers.disk.inside import is_serving_last
made = TierPair(Path(sys.argv[1])).recovered()
print("ready", flush=True)
made.store(chain("p", 1))
made.tier.clear()
until(lambda: is_serving_last(made.tier))
made.store_at_last(chain("p", 1)[0])
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
            until(lambda: len(namespaces(root)) == 2, "what it has stored after the reset")
            made.settled()
    finally:
        kill(process)


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_killed_process_stored_after_a_reset_goes_first(tmp_path, is_lost):
    root = tmp_path / "root"
    kill_after_a_reset(root)
    if is_lost:
        lose_catalogue(root)  # headers say which namespace a reset began
    with tier_pair(root, capacity_bytes=10 * on_disk()) as made:
        made.recovered()
        assert made.reasons([*chain("p", 1), *chain("q", 1)]) == [""] * 4
        for turn in range(3):
            made.store(chain(f"new {turn}", 1))
        made.settled()
        assert set(namespaces(root)) == {NAMESPACE.fingerprint}


def test_each_reset_is_a_namespace_of_its_own(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        fingerprints = {NAMESPACE.fingerprint}
        for _ in range(3):
            made.tier.clear()
            until(lambda: is_serving_last(made.tier))
            made.store_at_last(chain("p", 1)[0])
            fingerprints.add(wanted_namespace(made.tier).fingerprint)
        until(lambda: set(namespaces(made.root)) == fingerprints, "four namespaces")
        assert [usage.is_private for usage in catalogue_of(made.tier).usage()].count(True) == 3


def test_what_was_stored_before_goes_when_room_is_needed(tmp_path):
    with tier_pair(tmp_path / "root", capacity_bytes=12 * on_disk()) as made:
        made.store(chain("p", 8))
        kept = [made.path(planned) for planned in chain("p", 8)]
        made.tier.clear()
        for planned in chain("q", 8):
            made.store_at_last(planned)
        assert sum(path.exists() for path in kept) <= 3
        assert made.coverage(chain("q", 8)) == [True] * 9


@pytest.mark.parametrize("is_under_way", [False, True])
def test_what_recovery_finds_of_before_is_not_taken(tmp_path, is_under_way):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 3))
    device = GatedDevice("preadv")
    tier = DiskTierManager(settings(tmp_path / "root"), NAMESPACE, 1, OBJECT, device)
    if not is_under_way:
        device.gate.set()
        until(lambda: len(tier._served.updates) > 0)
    tier.clear()
    device.gate.set()
    until(lambda: tier.advance() or not tier.is_recovering)
    assert len(tier.index) == 0
    assert len(object_files(made.root)) == 4
    close_tier(tier)


def test_a_clean_end_after_a_reset_gives_the_room_back(tmp_path, said):
    with tier_pair(tmp_path / "root") as made:
        made.tier.clear()
        until(lambda: is_serving_last(made.tier))
        made.store_at_last(chain("p", 1)[0])
    assert counted(tmp_path / "root") == (on_disk(), 0)
    assert said() == []
