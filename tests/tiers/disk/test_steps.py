# SPDX-License-Identifier: Apache-2.0
"""What the scheduler has decided is done once, whatever fails in the middle of it."""

import contextlib
import time

import msgspec

from tests.tiers.disk.catalogue.inside import find
from tests.tiers.disk.files import object_files, on_disk
from tests.tiers.disk.inside import (
    catalogue_of,
    delay_bookkeeper,
    delay_following,
    held_files,
    room_bytes,
    stores_in_flight_bytes,
)
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.disk.catalogue import Busy, Catalogue, FellBehind, Limits, Namespace
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.writer import begin_life


class FailsOnce:
    """A call of the catalogue that raises ``error`` the first time that it is made."""

    def __init__(self, catalogue, call, error):
        self._real, self._error = getattr(catalogue, call), error
        self.num_calls = 0
        setattr(catalogue, call, self)

    def __call__(self, *arguments):
        self.num_calls += 1
        if self.num_calls == 1:
            raise self._error
        return self._real(*arguments)


def evict_as_another(root):
    """Another process takes away the row of the leaf that was used longest ago, and not yet its file."""
    life = begin_life(str(root), Device())
    with contextlib.closing(Catalogue(str(root))) as other:
        other.join(life.writer, Namespace(NAMESPACE.fingerprint))
        (victim,) = other.evict(life.writer, Limits(1, 1, frozenset()), int(time.time()))
        other.leave(life.writer)
    life.end()
    return victim.file


def assert_all_is_given_back(made):
    """No store is under way, and the catalogue has granted what the process thinks that it has."""
    assert stores_in_flight_bytes(made.tier) == 0
    assert room_bytes(made.tier) == catalogue_of(made.tier).give_back(writer_of(made), 0)


def writer_of(made):
    return made.file(chain("w", 1)[0]).writer


def store_first(made):
    """So that it is known whose the files are."""
    made.store(chain("w", 1))
    made.settled()


def test_a_busy_catalogue_after_a_commit_releases_the_room_once(tmp_path):
    """Somebody else was first, so the file is to be unlinked in another transaction."""
    planned, room, root = chain("p", 1)[0], 320 * on_disk(), tmp_path / "root"
    with tier_pair(root, capacity_bytes=room) as made, tier_pair(root, capacity_bytes=room) as other:
        store_first(made)
        ticket = made.write(planned)
        own = made.file(planned)
        with delay_following(made.tier):
            other.store([planned])
            other.settled()
            named = FailsOnce(catalogue_of(made.tier), "named", Busy("once"))
            made.tier.commit(ticket)
            until(lambda: named.num_calls > 1, "another try")
            made.turned()
        made.settled()
        assert_all_is_given_back(made)
        assert made.file(planned) == other.file(planned) != own
        assert made.reasons([planned]) == [""]
        assert len(object_files(made.root)) == 3


def test_a_busy_catalogue_after_a_refusal_releases_holds_once(tmp_path):
    good, refused = chain("good", 3), chain("refused", 2)
    with tier_pair(tmp_path / "root", capacity_bytes=320 * on_disk()) as made:
        made.store(chain("w", 1)[:1])
        made.store([refused[0]])
        made.store([good[0]])
        made.settled()
        loads = made.tier.acquire([*good[:1], *chain("w", 1)[:1]])
        tickets = [made.write(planned) for planned in (good[1], refused[1])]
        with delay_bookkeeper(made.tier):  # both in one batch
            made.tier.touch([good[0].object_id, chain("w", 1)[0].object_id])
            catalogue_of(made.tier).touch(NAMESPACE.fingerprint, [refused[0].object_id], 1)
            assert evict_as_another(made.root) == made.file(refused[0])
            named = FailsOnce(catalogue_of(made.tier), "named", Busy("once"))
            for ticket in tickets:
                made.tier.commit(ticket)
        until(lambda: named.num_calls > 1, "another try")
        made.settled()
        assert held_files(made.tier) == {load.part.file for load in loads}
        assert_all_is_given_back(made)
        assert made.coverage([*good[:2], *refused[:2]]) == [True, True, False, False]
        made.tier.release(loads)
        assert held_files(made.tier) == frozenset()


def test_an_object_that_no_row_can_hold_keeps_no_other_waiting(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        first, second = chain("p", 2)[:2]
        made.store([first])
        made.try_store(msgspec.structs.replace(second, parents=(first.object_id,) * 2))
        made.store(chain("q", 1))
        made.settled()
        wanted = [planned.object_id for planned in (first, chain("q", 1)[0])]
        assert len(find(catalogue_of(made.tier), NAMESPACE.fingerprint, wanted)) == 2


def test_an_object_that_was_evicted_before_a_reload_serves_again_once_it_is_stored_anew(tmp_path):
    first, second = chain("p", 2)[:2]
    with tier_pair(tmp_path / "root", capacity_bytes=40 * on_disk()) as made:
        made.store([first])
        made.settled()
        catalogue, behind = catalogue_of(made.tier), []
        changes_since = catalogue.changes_since

        def behind_once(*arguments):
            if not behind and not find(catalogue, NAMESPACE.fingerprint, [first.object_id]):
                behind.append(FellBehind("many changes of others"))
                raise behind[0]
            return changes_since(*arguments)

        catalogue.changes_since = behind_once
        turns = iter(range(1000))
        until(lambda: made.store(chain(f"many-{next(turns)}", 1)) or behind, "a reload after the eviction")
        until(lambda: made.tier.advance() or not made.has(first))
        made.store([first])
        made.settled()
        assert made.tier.acquire([first])
        assert made.outcome(second) == ""
