# SPDX-License-Identifier: Apache-2.0
"""A file that cannot be read is a miss for a while. It and what builds on it stay: only what is known wrong goes."""

import errno
from types import SimpleNamespace

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import bytes_under, counted, lose_catalogue, object_files, on_disk
from tests.tiers.disk.objects import OBJECT, chain, key
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.prompts import GEOMETRY, KEYS, NUM_TOKENS, PLANNER, objects_of
from tests.tiers.disk.tier_pair import TierPair, tier_pair
from tests.tiers.integrity import check_integrity
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk import hidden
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.object_file import READ_ATTEMPTS
from vllm_overlay.tiers.disk.hidden import UNREADABLE_S
from vllm_overlay.tiers.disk.recovery import rebuild

SNAPSHOT = PLANNER.snapshot(KEYS, 640)
CHUNK = PLANNER.chunk(KEYS, GEOMETRY.full[0], 4)
FIRST = PLANNER.chunk(KEYS, GEOMETRY.full[0], 0)
WHOLE = objects_of(KEYS, [320, 640])


@pytest.fixture
def clock(monkeypatch):
    """That of what is remembered of failures; all else waits by the real one."""
    now = [1000.0]
    monkeypatch.setattr(hidden, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def load(made: TierPair, objects: list[PlannedObject]) -> list[str]:
    """As the connector does it: pins, reads, tells the index what failed, unpins. Empty for what was loaded."""
    tickets = made.tier.acquire(objects)
    assert tickets is not None
    results = made.fetch(objects)
    for result in results:
        if result.is_bad:
            made.tier.drop(result.object_id)
        elif result.is_unreadable:
            made.tier.suspend(result.object_id)
    made.tier.release(tickets)
    check_integrity(made.tier.index)
    return [result.reason or "" for result in results]


def restore_point(made: TierPair) -> int:
    """As the scheduler's half looks it up."""
    made.tier.advance()
    return PLANNER.lookup(KEYS, NUM_TOKENS, 0, made.tier.hits(GEOMETRY, KEYS, NUM_TOKENS)).restore_point


def many_prompts() -> list[PlannedObject]:
    """Eighty prompts of three objects each that begin with the same chunk."""
    shared = PlannedObject(ObjectId("f0", key("shared")), (), 0, 64, OBJECT, 0)
    objects = [shared]
    for name in range(80):
        first, second = (ObjectId("f0", key(name, place)) for place in range(2))
        objects += [
            PlannedObject(first, (shared.object_id,), 64, 128, OBJECT, 0),
            PlannedObject(second, (first,), 128, 192, OBJECT, 0),
            PlannedObject(ObjectId("s", key(name)), (second,), 192, 192, OBJECT),
        ]
    return objects


# Loads.


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EACCES])
def test_one_error_of_a_read_costs_nothing(tmp_path, error, call):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("p", 2))
        device.fail(made.path(chain("p", 2)[0]), error, call, times=1)
        assert load(made, chain("p", 2)) == ["", "", ""]
        assert device.num_faults == 1


@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT])
def test_a_shared_chunk_that_cannot_be_read_loses_nothing_on_disk(tmp_path, error):
    device = FailingDevice()
    objects = many_prompts()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(objects)
        device.fail(made.path(objects[0]), error)
        assert load(made, objects[:2]) == ["io_error", ""]
        made.store(chain("q", 1))  # the bookkeeper has been through what was to be removed
    assert len(object_files(made.root)) == len(objects) + 2
    with tier_pair(tmp_path / "root") as again:
        assert all(again.recovered().coverage(objects))
    assert device.num_faults == READ_ATTEMPTS


def test_a_file_that_ends_before_its_size_says_is_not_known_to_be_wrong(tmp_path):
    class Short(Device):
        ends = False

        def preadv(self, fd, segments, offset):
            return 0 if self.ends else super().preadv(fd, segments, offset)

    device = Short()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("p", 1))
        made.recovered()
        device.ends = True
        assert [(one.reason, one.is_bad) for one in made.fetch(chain("p", 1))] == [("io_error", False)] * 2
        device.ends = False
        assert made.reasons(chain("p", 1)) == ["", ""]


# What is offered meanwhile.


@pytest.fixture
def made(tmp_path, clock):
    """All of the prompt is there."""
    with tier_pair(tmp_path / "root", device=FailingDevice()) as made:
        made.recovered()
        made.store(WHOLE)
        yield made


def unreadable(made: TierPair, planned: PlannedObject) -> None:
    """One load has failed for this object; the disk is well again."""
    assert isinstance(made.device, FailingDevice)
    made.device.fail(made.path(planned), errno.EIO, times=READ_ATTEMPTS)
    assert load(made, [planned]) == ["io_error"]


@pytest.mark.parametrize(("planned", "below"), [(SNAPSHOT, 320), (CHUNK, 0), (FIRST, 0)])
def test_what_could_not_be_read_is_not_offered_for_a_while_and_then_again(made, clock, planned, below):
    assert restore_point(made) == 640
    unreadable(made, planned)
    assert restore_point(made) == below
    clock[0] += UNREADABLE_S - 1
    assert restore_point(made) == below
    clock[0] += 1
    assert restore_point(made) == 640
    assert load(made, WHOLE) == [""] * len(WHOLE)


def test_other_prompts_are_offered_meanwhile(made):
    assert restore_point(made) == 640
    made.store(chain("q", 1))
    unreadable(made, chain("q", 1)[0])
    assert restore_point(made) == 640


def test_it_is_stored_again_and_found_at_once_with_all_that_builds_on_it(made):
    unreadable(made, FIRST)
    assert not made.tier.has_or_awaits(FIRST.object_id)
    ticket = made.tier.reserve(FIRST)
    assert ticket is not None
    assert made.tier.has_or_awaits(FIRST.object_id)
    assert made.tier.reserve(FIRST) is None  # it is on its way
    assert restore_point(made) == 0
    made.tier.abort(ticket.ticket)
    assert restore_point(made) == 0
    count, before = len(object_files(made.root)), made.path(FIRST)
    made.store([FIRST])
    assert restore_point(made) == 640
    assert made.path(FIRST) != before
    assert load(made, WHOLE) == [""] * len(WHOLE)
    until(lambda: not before.exists(), "the old file's end")
    made.settled()
    assert len(object_files(made.root)) == count
    assert counted(made.root)[0] == bytes_under(made.root) == made.tier.usage().used_bytes
    assert made.tier.reserve(FIRST) is None


@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_a_drop_while_it_is_stored_again_costs_nothing_that_builds_on_it(made, clock, ending):
    """The store is overdue, or an earlier load has found the old file to be wrong, which is about to be replaced."""
    unreadable(made, FIRST)
    ticket = made.write(FIRST)
    made.tier.drop(FIRST.object_id)
    getattr(made.tier, ending)(ticket)
    clock[0] += UNREADABLE_S
    if ending == "abort":  # nobody knows why it was dropped
        assert restore_point(made) == 0
        made.store([FIRST])
    assert restore_point(made) == 640
    assert load(made, WHOLE) == [""] * len(WHOLE)


def test_it_gives_way_like_all_else_when_room_is_needed(tmp_path):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device, capacity_bytes=12 * on_disk()) as made:
        made.recovered()
        made.store(chain("p", 5))
        unreadable(made, chain("p", 5)[0])
        for name in "qr":
            made.store(chain(name, 9))
        assert not any(made.coverage(chain("p", 5)))
        assert made.reasons(chain("r", 9)) == [""] * 10


def test_a_reset_forgets_what_could_not_be_read(made):
    unreadable(made, FIRST)
    made.tier.clear()
    tickets = []
    until(lambda: made.tier.advance() or tickets.append(made.tier.reserve(FIRST)) or tickets[-1])
    made.tier.commit(tickets[-1].ticket)
    assert made.tier.hits(GEOMETRY, KEYS, NUM_TOKENS).has(FIRST.object_id)


# When a lost catalogue is made anew.


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_header_that_a_rebuild_cannot_read_costs_what_builds_on_it_and_leaves_nothing_uncounted(
    tmp_path, monkeypatch, error
):
    monkeypatch.setattr(rebuild, "GIVE_UP_S", 0.0)
    device = FailingDevice()
    with tier_pair(tmp_path / "root") as before:
        before.store([*WHOLE, *chain("p", 2)])
    lose_catalogue(before.root)
    device.fail(before.path(FIRST), error)
    with tier_pair(tmp_path / "root", device=device) as made:
        made.recovered()
        assert restore_point(made) == 0
        assert made.coverage(chain("p", 2)) == [True] * 3
        until(lambda: len(object_files(made.root)) == 3, "the end of what nobody can reach")
        made.store(WHOLE)
        assert restore_point(made) == 640
        assert load(made, WHOLE) == [""] * len(WHOLE)
    assert problems(made.root) == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_one_error_of_a_rebuild_costs_nothing_and_a_start_with_its_catalogue_reads_no_header(tmp_path, is_lost):
    device = FailingDevice()
    with tier_pair(tmp_path / "root") as before:
        before.store(WHOLE)
    if is_lost:
        lose_catalogue(before.root)
    device.fail(before.path(FIRST), errno.EIO, times=1)
    with tier_pair(tmp_path / "root", device=device) as made:
        assert all(made.recovered().coverage(WHOLE))
    assert device.num_faults == is_lost


LACKS = (errno.EMFILE, errno.ENOMEM)


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("error", [*LACKS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EINVAL])
def test_a_failed_read_is_a_miss_and_what_this_process_lacks_says_nothing_of_the_object(tmp_path, call, error):
    """EINVAL: no O_DIRECT, where the root was replaced."""
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("p", 1))
        device.faults[call] = error
        found = [(one.reason, one.is_bad, one.is_unreadable) for one in made.fetch(chain("p", 1)[:1])]
        assert found == [("io_error", False, error not in LACKS)]
        device.faults.clear()
        assert made.reasons(chain("p", 1)) == ["", ""]
