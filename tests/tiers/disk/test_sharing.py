# SPDX-License-Identifier: Apache-2.0
"""What another process stores is found while both run; and what must not be found is not."""

import time

import numpy as np
import pytest

from tests.naive_twin import block_hashes
from tests.tiers.disk.devices import GatedDevice
from tests.tiers.disk.files import object_files
from tests.tiers.disk.inside import num_pending_lookups
from tests.tiers.disk.objects import bytes_of, content
from tests.tiers.disk.processes import kill, start
from tests.tiers.disk.prompts import GEOMETRY, KEYS, NUM_TOKENS, PLANNER, objects_of
from tests.tiers.disk.tier_pair import TierPair, load_ticket, tier_pair
from tests.tiers.disk.waiting import until
from vllm_overlay.tiers.disk import async_lookup
from vllm_overlay.tiers.disk.device import Device


def lookup(made: TierPair, keys=KEYS, num_tokens=NUM_TOKENS):
    """As the scheduler's half does it."""
    made.tier.advance()
    found = PLANNER.lookup(keys, num_tokens, 0, made.tier.index)
    made.tier.look_further(PLANNER, keys, num_tokens, found.restore_point)
    return found.restore_point


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(async_lookup, "ANSWER_S", 0.05)


@pytest.fixture
def two(tmp_path):
    """Two engines that were there before anything was stored."""
    with tier_pair(tmp_path / "root") as one, tier_pair(tmp_path / "root") as other:
        yield one.recovered(), other.recovered()


STORER = """
import sys, time
from pathlib import Path
from tests.tiers.disk.tier_pair import TierPair
from tests.tiers.disk.prompts import KEYS, objects_of
made = TierPair(Path(sys.argv[1])).recovered()
print("ready", flush=True)
made.store(objects_of(KEYS, [320, 560]))
print("stored", flush=True)
time.sleep(600)
"""


def test_what_another_process_stores_is_found_without_a_restart(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.recovered()
        assert lookup(made) == 0
        other = start(STORER, root)
        try:
            assert other.stdout.readline() == "stored\n"
            until(lambda: lookup(made) == 560)
            assert other.poll() is None
            plan = PLANNER.load_plan(KEYS, 0, 560)
            tickets = made.tier.acquire(plan)
            assert [ticket.object_id for ticket in tickets] == [planned.object_id for planned in plan]
            assert made.reasons(plan) == [""] * len(plan)
        finally:
            kill(other)


def test_the_first_lookup_does_not_wait_and_a_later_one_finds(two):
    one, other = two
    one.store(objects_of(KEYS, [640]))
    assert lookup(other) == 0
    until(lambda: lookup(other) == 640)


def test_what_ends_in_the_middle_is_found_up_to_there(two):
    one, other = two
    one.store([item for item in objects_of(KEYS, [320]) if item.end_tokens <= 320])
    longer = block_hashes(bytes(range(20)) + bytes(100))
    until(lambda: lookup(other, longer, len(longer) * 16) == 320)
    lookup(other, longer, len(longer) * 16)
    assert len(other.tier.index) == 5 + 2 + 1  # chunks, the window's, the snapshot


def test_chunks_without_a_snapshot_are_found_so_that_a_junction_is(two):
    one, other = two
    one.store(objects_of(KEYS, []))
    until(lambda: lookup(other) or len(other.tier.index) >= 10)
    found = PLANNER.lookup(KEYS, NUM_TOKENS, 0, other.tier.index)
    assert (found.restore_point, found.junction) == (0, 640)


def test_an_object_that_lacks_a_rank_is_not_found(tmp_path):
    with tier_pair(tmp_path / "root", world_size=2) as one, tier_pair(tmp_path / "root", world_size=2) as other:
        other.recovered()
        one.store(objects_of(KEYS, [320, 640]))
        one.path(PLANNER.snapshot(KEYS, 640), 1).unlink()
        until(lambda: lookup(other) == 320)


def test_what_does_not_verify_is_not_found_and_stays_its_owners(two):
    one, other = two
    one.store(objects_of(KEYS, [320, 640]))
    path = one.path(PLANNER.chunk(KEYS, GEOMETRY.full[0], 6))  # the search in halves does not ask for it
    path.write_bytes(bytes(path.stat().st_size))
    files = object_files(one.root)
    until(lambda: lookup(other) == 320)
    other.tier.advance()
    assert len(other.tier.index) < len(files)
    assert object_files(one.root) == files


class Counting(Device):
    """Knows how many files of objects were asked for."""

    def __init__(self):
        self.asked = 0

    def open(self, path, flags):
        self.asked += path.endswith(".r0")
        return super().open(path, flags)


def test_no_is_remembered_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(async_lookup, "ANSWER_S", 600.0)
    device = Counting()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.recovered()
        assert lookup(made) == 0
        until(lambda: num_pending_lookups(made.tier) == 0)
        asked = device.asked
        assert 0 < asked <= 40
        for _ in range(50):
            assert lookup(made) == 0
        until(lambda: num_pending_lookups(made.tier) == 0)
        assert device.asked == asked


def test_names_are_forgotten_in_time_and_in_number(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    recent = async_lookup.Recent(5.0)
    for name in range(async_lookup._MAX_ANSWERS + 1):
        recent.add(name)
    assert 0 not in recent and 1 in recent
    now[0] = 5.0
    assert 1 not in recent


def test_a_prompt_may_cost_so_many_probes_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(async_lookup, "_MAX_PROBES", 3)
    device = Counting()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.recovered()
        lookup(made)
        until(lambda: num_pending_lookups(made.tier) == 0)
        assert device.asked <= 3


def test_what_could_not_be_loaded_is_not_found_again_at_once(two):
    one, other = two
    one.store(objects_of(KEYS, [320, 640]))
    until(lambda: lookup(other) == 640)
    other.tier.drop(PLANNER.snapshot(KEYS, 640).object_id)
    until(lambda: not one.path(PLANNER.snapshot(KEYS, 640)).exists())  # it goes for both
    one.tier.drop(PLANNER.snapshot(KEYS, 640).object_id)
    one.store([PLANNER.snapshot(KEYS, 640)])
    until(lambda: lookup(other) == 320)
    for _ in range(10):
        assert lookup(other) == 320
        time.sleep(0.02)


def test_after_clear_nothing_of_others_is_found(two):
    one, other = two
    other.tier.clear()
    one.store(objects_of(KEYS, [640]))
    for _ in range(10):
        assert lookup(other) == 0
        time.sleep(0.02)


def test_what_another_evicts_while_it_is_read_is_read_to_its_end(tmp_path):
    device = GatedDevice("preadv")
    objects = objects_of(KEYS, [640])
    with tier_pair(tmp_path / "root") as one, tier_pair(tmp_path / "root", device=device, read_threads=2) as other:
        one.recovered()
        device.gate.set()
        other.recovered()
        one.store(objects)
        device.gate.clear()
        worker = other.workers[0]
        worker.begin_load("slow", [load_ticket(planned) for planned in objects[:2]])
        for _ in range(2):
            assert device.waiting.acquire(timeout=20)  # opened, and not yet read
        one.tier.drop(objects[0].object_id)
        until(lambda: not object_files(one.root))
        device.gate.set()
        results = []
        until(lambda: results.extend(worker.poll()[1]) or len(results) == 2)
        for result in results:
            assert np.array_equal(bytes_of(result.buffer), content(objects[result.position], 0))


def test_a_disk_that_hangs_holds_no_lookup(tmp_path):
    class Hanging(Counting):
        def open(self, path, flags):
            if path.endswith(".r0"):
                until(lambda: self.asked)
            return super().open(path, flags)

    device = Hanging()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.recovered()
        for turn in range(200):
            keys = block_hashes(bytes([turn, 1, 2, 3, 4, 5, 6, 7]))
            assert lookup(made, keys, len(keys) * 16 + 1) == 0
        assert num_pending_lookups(made.tier) == async_lookup._MAX_PENDING
        device.asked = 1
