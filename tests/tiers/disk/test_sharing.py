# SPDX-License-Identifier: Apache-2.0
"""What another process stores is found while both run; and what must not be found is not."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.tiers.disk.devices import GatedDevice
from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import catalogue_of, delay_bookkeeper, delay_following, is_serving_last, tell
from tests.tiers.disk.objects import GEOMETRY as TIER_GEOMETRY
from tests.tiers.disk.objects import bytes_of, chain, content
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.processes import kill, start
from tests.tiers.disk.prompts import KEYS, NUM_TOKENS, PLANNER, objects_of
from tests.tiers.disk.tier_pair import TierPair, tier_pair
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import File, Gone, Limits, Namespace, StoredObject


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


# One object in two files.


def row_files(made: TierPair) -> dict[ObjectId, File]:
    """What the catalogue has."""
    loaded = catalogue_of(made.tier).load(made.namespace.fingerprint)[1]
    return {item.object_id: item.file for part in loaded for item in part}


def test_two_engines_that_store_the_same_objects_count_them_once_and_the_first_ones_files_stay(two):
    one, other = two
    objects = chain("p", 4)[:4]
    tickets = [(made, made.write(planned)) for planned in objects for made in (one, other)]
    assert len(object_files(one.root)) == 8
    for made, ticket in tickets:
        made.tier.commit(ticket)
        if made is one:
            one.settled()
    until(lambda: len(object_files(one.root)) == 4, "the end of the second files")
    one.settled()
    other.settled()
    assert {file.writer for file in row_files(one).values()} == {one.file(objects[0]).writer}
    assert all(one.file(planned) == other.file(planned) for planned in objects)
    assert counted(one.root)[0] == bytes_under(one.root) == 4 * on_disk()
    assert one.reasons(objects) == other.reasons(objects) == [""] * 4
    assert problems(one.root) == []


def test_a_row_of_a_number_that_no_engine_gives_is_a_miss_and_no_error(tmp_path):
    """A forged one, which came first."""
    planned, forger = chain("p", 1)[0], "f" * 16
    with tier_pair(tmp_path / "root") as made:
        ticket = made.recovered().write(planned)
        catalogue = catalogue_of(made.tier)
        catalogue.join(forger, Namespace(made.namespace.fingerprint))
        assert catalogue.grant(forger, on_disk(), on_disk(), 1 << 30).num_bytes
        row = StoredObject(
            made.namespace.fingerprint, made.namespace.stored(planned), File(forger, 1 << 60), 1, on_disk(), 0
        )
        assert catalogue.commit(forger, [(row, None)])
        made.tier.commit(ticket)
        made.settled()
        assert made.tier.acquire([planned]) is None


def is_offered(made: TierPair, planned: PlannedObject) -> bool:
    made.tier.advance()
    return made.tier.hits(TIER_GEOMETRY, [planned.object_id.key], 64).has(planned.object_id)


def test_an_object_that_does_not_verify_is_hidden_stored_anew_and_what_builds_on_it_stays(two):
    one, other = two
    objects = chain("p", 4)
    one.store(objects)
    until(lambda: other.tier.advance() or all(other.coverage(objects)))
    before = [one.path(planned) for planned in objects]
    with before[0].open("r+b") as file:
        file.seek(5000)
        file.write(b"wrong")
    assert one.reasons(objects[:1]) == ["checksum"]
    one.tier.drop(objects[0].object_id)
    assert not is_offered(one, objects[0]) and is_offered(other, objects[0])
    assert not one.tier.has_or_awaits(objects[0].object_id)
    one.store_at_last(objects[0])
    assert is_offered(one, objects[0])
    one.settled()
    until(lambda: not before[0].exists(), "the end of the bad file")
    until(lambda: other.tier.advance() or other.file(objects[0]) == one.file(objects[0]), "word of it")
    assert [one.path(planned) for planned in objects][1:] == before[1:]
    assert one.reasons(objects) == other.reasons(objects) == [""] * 5
    assert counted(one.root)[0] == bytes_under(one.root) == 5 * on_disk()
    assert problems(one.root) == []


def test_of_two_engines_that_store_a_bad_object_anew_the_first_ones_file_stays(two):
    one, other = two
    objects = chain("p", 2)
    one.store(objects)
    until(lambda: other.tier.advance() or all(other.coverage(objects)))
    bad = one.file(objects[0])
    for made in two:
        made.tier.drop(objects[0].object_id)
    tickets = [made.write(objects[0]) for made in two]
    with delay_following(other.tier):
        one.tier.commit(tickets[0])
        first = one.settled().file(objects[0])
        other.tier.commit(tickets[1])
        until(lambda: len(object_files(one.root)) == 3, "the end of the second file, and of the bad one")
        assert row_files(one)[objects[0].object_id] == first != bad
    until(lambda: other.tier.advance() or other.file(objects[0]) == first)
    assert one.reasons(objects) == other.reasons(objects) == [""] * 3
    assert problems(one.root) == []


def test_word_that_another_file_of_an_object_went_leaves_the_object_and_its_children_alone(two):
    one, _ = two
    objects = chain("p", 2)
    one.store(objects)
    one.settled()
    tell(one.tier, Gone(objects[2].object_id, File("0" * 16, 1)))
    tell(one.tier, Gone(objects[0].object_id, File(one.file(objects[0]).writer, 999)))
    one.tier.advance()
    assert one.coverage(objects) == [True] * 3
    tell(one.tier, Gone(objects[2].object_id, one.file(objects[2])))
    one.tier.advance()
    assert one.coverage(objects) == [True, True, False]


def test_what_another_evicts_is_no_longer_offered(two):
    one, other = two
    (chunk, _) = chain("p", 1)
    one.store([chunk])
    until(lambda: other.tier.advance() or other.has(chunk))
    catalogue_of(one.tier).evict(one.file(chunk).writer, Limits(1 << 40, 1), 1 << 38)
    until(lambda: other.tier.advance() or not other.has(chunk), "word of it")


def test_what_was_evicted_while_it_was_stored_anew_is_there(two):
    """The feed tells of the old file's end after the new one is in use."""
    one, other = two
    (chunk, _) = chain("p", 1)
    one.store([chunk])
    until(lambda: other.tier.advance() or other.has(chunk))
    other.tier.drop(chunk.object_id)
    ticket = other.write(chunk)
    with delay_following(other.tier):
        catalogue_of(one.tier).evict(one.file(chunk).writer, Limits(1 << 40, 1), 1 << 38)
        other.tier.commit(ticket)
        until(lambda: row_files(one) == {chunk.object_id: other.file(chunk)}, "its row")
    until(lambda: one.settled() and one.has(chunk))
    assert other.settled().has(chunk)
    assert one.reasons([chunk]) == other.reasons([chunk]) == [""]


def test_what_hangs_on_a_parent_that_others_evict_and_store_meanwhile_is_there(two):
    """Its commit comes after that, and news of that after the commit."""
    one, other = two
    parent, child = chain("p", 2)[:2]
    one.store([parent])
    until(lambda: other.tier.advance() or other.has(parent))
    ticket = one.write(child)
    with delay_bookkeeper(one.tier):
        one.tier.commit(ticket)
        catalogue_of(other.tier).evict(one.file(parent).writer, Limits(1 << 40, 1), 1 << 38)
        until(lambda: other.tier.advance() or not other.has(parent), "word of it")
        other.store([parent])
        other.settled()
    one.settled()
    assert one.file(parent) == other.file(parent)
    assert one.coverage([parent, child]) == [True, True]
    assert one.reasons([parent, child]) == ["", ""]


def test_after_clear_nothing_of_others_is_found(two):
    one, other = two
    other.tier.clear()
    one.store(objects_of(KEYS, [640]))
    assert lookup(other) == 0
    until(lambda: is_serving_last(other.tier), "a reset")
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
        until(lambda: other.tier.advance() or all(other.coverage(objects)))
        device.gate.clear()
        worker = other.workers[0]
        worker.begin_load("slow", [other.load_ticket(planned) for planned in objects[:2]])
        for _ in range(2):
            device.await_call()  # opened, and not yet read
        for path in object_files(one.root):  # as an eviction does
            path.unlink()
        device.gate.set()
        results = []
        until(lambda: results.extend(worker.poll()[1]) or len(results) == 2)
        for result in results:
            assert np.array_equal(bytes_of(result.buffer), content(objects[result.position], 0))


def promised_and_missing(made: TierPair, objects: list[PlannedObject]) -> tuple[int, int]:
    """Loads what of these can be found, as an engine does."""
    made.tier.advance()
    wanted = [planned for planned in objects if made.has(planned)]
    if not wanted or (tickets := made.tier.acquire(wanted)) is None:
        return 0, 0
    reasons = made.reasons(wanted)
    made.tier.release(tickets)
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
