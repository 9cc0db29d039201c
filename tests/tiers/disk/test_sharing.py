# SPDX-License-Identifier: Apache-2.0
"""What another process stores is found while both run; and what must not be found is not."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.tiers.disk.devices import GatedDevice
from tests.tiers.disk.files import counted, object_files, on_disk
from tests.tiers.disk.objects import bytes_of, chain, content
from tests.tiers.disk.processes import kill, start
from tests.tiers.disk.prompts import KEYS, NUM_TOKENS, PLANNER, objects_of
from tests.tiers.disk.reset import is_serving_another
from tests.tiers.disk.tier_pair import TierPair, load_ticket, tier_pair
from tests.waiting import PATIENCE_S, until
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.tiers.disk import recent


def lookup(made: TierPair) -> int:
    """As the scheduler's half does it."""
    made.tier.advance()
    return PLANNER.lookup(KEYS, NUM_TOKENS, 0, made.tier.index).restore_point


@pytest.fixture
def two(tmp_path) -> Iterator[tuple[TierPair, TierPair]]:
    """Two engines that were there before anything was stored."""
    with tier_pair(tmp_path / "root") as one, tier_pair(tmp_path / "root") as other:
        yield one.recovered(), other.recovered()


STORER = """
import sys
from pathlib import Path
from tests.tiers.disk.tier_pair import TierPair
from tests.tiers.disk.prompts import KEYS, objects_of
made = TierPair(Path(sys.argv[1])).recovered()
print("ready", flush=True)
made.store(objects_of(KEYS, [320, 560]))
print("stored", flush=True)
sys.stdin.read()
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


def test_what_ends_in_the_middle_is_found_up_to_there(two):
    one, other = two
    one.store([item for item in objects_of(KEYS, [320]) if item.end_tokens <= 320])
    until(lambda: lookup(other) == 320)


def test_chunks_without_a_snapshot_are_found_so_that_a_junction_is(two):
    one, other = two
    objects = objects_of(KEYS, [])
    one.store(objects)
    until(lambda: lookup(other) or len(other.tier.index) == len(objects))
    found = PLANNER.lookup(KEYS, NUM_TOKENS, 0, other.tier.index)
    assert (found.restore_point, found.junction) == (0, 640)


def test_what_one_finds_to_be_wrong_is_gone_for_the_other(two):
    one, other = two
    one.store(objects_of(KEYS, [320, 640]))
    until(lambda: lookup(other) == 640)
    snapshot = PLANNER.snapshot(KEYS, 640)
    other.tier.drop(snapshot.object_id)
    assert lookup(other) == 320
    until(lambda: lookup(one) == 320)
    assert not one.path(snapshot).exists()
    one.store([snapshot])
    until(lambda: lookup(other) == 640)


def test_what_others_dropped_while_we_store_it_is_stored_once_more(two):
    one, other = two
    (chunk, _) = chain("p", 1)
    one.store([chunk])
    until(lambda: other.tier.advance() or other.has(chunk))
    other.tier.drop(chunk.object_id)
    until(lambda: other.tier.advance() or other.outcome(chunk) == "")
    until(lambda: one.tier.advance() or (one.has(chunk) and counted(one.root)[0] == on_disk()))
    assert one.reasons([chunk]) == other.reasons([chunk]) == [""]


def test_after_clear_nothing_of_others_is_found(two):
    one, other = two
    other.tier.clear()
    one.store(objects_of(KEYS, [640]))
    assert lookup(other) == 0
    until(lambda: is_serving_another(other), "a reset")
    one.settled()
    for _ in range(3):
        other.turned()
        assert lookup(other) == 0


def test_what_another_removes_while_it_is_read_is_read_to_its_end(tmp_path):
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
            assert device.waiting.acquire(timeout=PATIENCE_S)  # opened, and not yet read
        one.tier.drop(objects[0].object_id)
        until(lambda: not object_files(one.root))
        device.gate.set()
        results = []
        until(lambda: results.extend(worker.poll()[1]) or len(results) == 2)
        for result in results:
            assert np.array_equal(bytes_of(result.buffer), content(objects[result.position], 0))


def promised_and_missing(made: TierPair, objects: list[PlannedObject]) -> tuple[int, int]:
    """Loads what of these can be found, as an engine does."""
    made.tier.advance()
    wanted = [planned for planned in objects if made.has(planned)]
    if not wanted or made.tier.acquire(wanted) is None:
        return 0, 0
    reasons = made.reasons(wanted)
    made.tier.release([planned.object_id for planned in wanted])
    assert set(reasons) <= {"", "missing"}
    for planned, reason in zip(wanted, reasons, strict=True):
        if reason:
            made.tier.drop(planned.object_id)
    return len(wanted), reasons.count("missing")


def test_two_processes_in_one_small_namespace_keep_what_they_promise(tmp_path):
    """Each evicts what the others stored too. What was used last goes last, so little of what is promised goes."""
    capacity = 100 * on_disk()
    promised = missing = 0
    with (
        tier_pair(tmp_path / "root", capacity_bytes=capacity) as one,
        tier_pair(tmp_path / "root", capacity_bytes=capacity) as other,
    ):
        for turn in range(60):
            for made, name in ((one, f"one {turn}"), (other, f"other {turn}")):
                for planned in chain(name, 3):
                    if made.outcome(planned) != "":
                        break
            for made in (one, other):
                for last in (turn, turn - 3, turn - 8):
                    for name in ("one", "other"):
                        counts = promised_and_missing(made, chain(f"{name} {last}", 3))
                        promised, missing = promised + counts[0], missing + counts[1]
    assert promised > 1000
    assert missing < 0.02 * promised


def test_names_are_forgotten_in_time_and_in_number(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    names = recent.Recent(5.0)
    for name in range(recent._MOST_NAMES + 1):
        names.add(name)
    assert 0 not in names and 1 in names
    now[0] = 5.0
    assert 1 not in names
