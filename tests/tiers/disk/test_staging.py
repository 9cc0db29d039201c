# SPDX-License-Identifier: Apache-2.0
"""Host memory on its way to and from files: large loads come in pieces, and cancelled ones give it back."""

from functools import partial

import pytest
from msgspec.structs import replace

from tests.tiers.disk.devices import GatedDevice
from tests.tiers.disk.inside import free_staging_units, num_fetched
from tests.tiers.disk.objects import OBJECT, UNIT, chain
from tests.tiers.disk.tier_pair import NAMESPACE, NOWHERE, settings, tier_pair
from tests.waiting import until
from vllm_overlay.config import KIB, MIB, ConfigError
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.tiers.base import Fingerprints, StoreTicket, WorkerContext
from vllm_overlay.tiers.disk.messages import DiskPart
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.factory import tier_spec

TICKET = StoreTicket(256, chain("p", 1)[0], DiskPart(NOWHERE, NAMESPACE.fingerprint))


def test_two_loads_larger_than_the_staging_both_end(tmp_path):
    with tier_pair(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        objects = chain("p", 10)
        made.store(objects)
        worker = made.workers[0]
        tickets = [made.load_ticket(planned) for planned in objects]
        worker.begin_load("one", tickets)
        worker.begin_load("two", tickets)
        ended = []

        def poll():
            for result in worker.poll()[1]:
                assert result.reason is None
                worker.end_fetch(result.load_id, result.position)
                ended.append((result.load_id, result.position))
            return len(ended) == 22

        until(poll)
        assert len(set(ended)) == 22


def test_stores_leave_staging_for_loads(tmp_path):
    with tier_pair(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        objects = chain("p", 6)
        made.store(objects[:1])
        tickets = [made.tier.reserve(planned) for planned in objects[1:]]
        buffers = [made.workers[0].begin_store(ticket) for ticket in tickets]
        assert [buffer is not None for buffer in buffers] == [True, False, False, False, False, False]
        assert made.reasons(objects[:1]) == [""]


def test_what_two_full_steps_store_fits_by_default(tmp_path):
    attention = Group(0, GroupKind.FULL, 1024, token_bytes=16 * KIB, page_bytes=16 * MIB, sliceable=False)
    state = Group(1, GroupKind.RECURRENT, 1024, token_bytes=0, page_bytes=25 * MIB, sliceable=False)
    geometry = Geometry.build([attention, state], 1024, "auto")
    made = tier_spec({"tier": "disk", "root": str(tmp_path / "root")})
    context = WorkerContext(geometry, 0, 1, 16_384, lambda *_: Fingerprints("a" * 64, "b" * 64, {}))
    worker, _ = made.build_worker(context)
    sizes = 2 * ([16 * MIB] * 16 + [25 * MIB])
    planned = [replace(TICKET.planned, num_bytes=num_bytes) for num_bytes in sizes]
    assert None not in [worker.begin_store(replace(TICKET, planned=item)) for item in planned]
    worker.close(1.0)


def test_stores_of_small_objects_are_taken_as_long_as_there_is_staging_memory(tmp_path):
    """However many: a step of a GPU has 512 blocks of 16 tokens."""
    device = GatedDevice("pwritev")
    with tier_pair(tmp_path / "root", device=device, staging_bytes=800 * UNIT, capacity_bytes="1GiB") as made:
        taken = []
        for planned in chain("p", 500, 1):
            ticket = until(partial(made.tier.reserve, planned), "room")
            taken.append(made.workers[0].begin_store(ticket))
            if taken[-1] is not None:
                made.workers[0].submit_store(ticket, taken[-1])
        device.gate.set()
        assert None not in taken


def test_an_object_larger_than_promised_is_refused_and_not_blamed(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        (result, *_) = made.fetch(chain("p", 1, OBJECT + 1))
        assert (result.reason, result.is_bad) == ("too_large", False)


def test_a_staging_too_small_for_the_largest_object_is_refused_with_a_size_that_works(tmp_path):
    with pytest.raises(ConfigError, match="staging_bytes") as refusal:
        engine_settings = settings(tmp_path, staging_bytes=5 * UNIT)
        DiskTierWorker(engine_settings, NAMESPACE, 0, 1, UNIT, OBJECT)
    works = int(str(refusal.value).split()[-1])
    DiskTierWorker(settings(tmp_path, staging_bytes=works), NAMESPACE, 0, 1, UNIT, OBJECT).close(1.0)


def test_cancelling_a_load_frees_its_staging(tmp_path):
    device = GatedDevice("preadv")
    with tier_pair(tmp_path / "root", device=device, staging_bytes=8 * UNIT, read_threads=1) as made:
        objects = chain("p", 5)
        made.store(objects)
        worker = made.workers[0]
        worker.begin_load("gone", [made.load_ticket(planned) for planned in objects])
        device.await_call()  # one is being read, one is queued, the others wait for room
        worker.cancel_load("gone")
        device.gate.set()
        until(lambda: free_staging_units(worker) == 8)
        assert worker.poll() == ([], [])
        assert made.reasons(objects) == [""] * 6


def test_cancelling_a_load_takes_back_what_was_fetched_and_not_ended(tmp_path):
    with tier_pair(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        objects = chain("p", 5)
        made.store(objects)
        worker = made.workers[0]
        tickets = [made.load_ticket(planned) for planned in objects]
        worker.begin_load("polled", tickets)
        polled = []
        until(lambda: polled.extend(worker.poll()[1]) or len(polled) == 2)
        worker.cancel_load("polled")
        worker.begin_load("polled", tickets)  # the name may be used again
        until(lambda: num_fetched(worker) == 2)
        worker.cancel_load("polled")
        until(lambda: free_staging_units(worker) == 8)
        assert worker.poll() == ([], [])


def test_a_cancelled_store_gives_its_buffer_back(tmp_path):
    with tier_pair(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        for _ in range(20):
            made.workers[0].cancel_store(TICKET, made.workers[0].begin_store(TICKET))
        assert made.workers[0].pending_stores() == 0
