# SPDX-License-Identifier: Apache-2.0
"""What the scheduler has decided is done once, whatever fails in the middle of it."""

import time

import msgspec

from tests.tiers.disk.files import on_disk
from tests.tiers.disk.inside import catalogue_of, delay_bookkeeper, held_objects, room_bytes, stores_in_flight_bytes
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.disk.catalogue import Busy, Catalogue, FellBehind, Name


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


def remove_as_another(root, planned):
    """Another process takes away the object's row, and not yet its file."""
    other = Catalogue(str(root))
    other.join([], int(time.time()))
    for removed in other.remove([Name(NAMESPACE.attention, planned.object_id)]):
        other.end_removal([item.name for item in removed], 0, 0)
    other.leave()
    other.close()


def assert_all_is_given_back(made):
    """No store is under way, and the catalogue has granted what the process thinks that it has."""
    assert stores_in_flight_bytes(made.tier) == 0
    assert room_bytes(made.tier) == catalogue_of(made.tier).give_back(0)


def test_a_busy_catalogue_after_a_commit_releases_the_room_once(tmp_path):
    with tier_pair(tmp_path / "root", capacity_bytes=320 * on_disk()) as made:
        made.store(chain("w", 2))
        made.settled()
        planned = chain("p", 1)[0]
        ticket = made.write(planned)
        made.path(planned).unlink()  # another process has removed what had the name before
        remove = FailsOnce(catalogue_of(made.tier), "remove", Busy("once"))
        made.tier.commit(ticket)
        until(lambda: remove.num_calls > 1, "another try")
        made.settled()
        assert_all_is_given_back(made)


def test_a_busy_catalogue_after_a_refusal_releases_holds_once(tmp_path):
    good, refused = chain("good", 3), chain("refused", 2)
    with tier_pair(tmp_path / "root", capacity_bytes=320 * on_disk()) as made:
        made.store([good[0], refused[0]])
        made.settled()
        assert made.tier.acquire([good[0]])
        tickets = [made.write(planned) for planned in (good[1], refused[1])]
        remove_as_another(made.root, refused[0])
        find = FailsOnce(catalogue_of(made.tier), "find", Busy("once"))
        with delay_bookkeeper(made.tier):  # both in one batch
            for ticket in tickets:
                made.tier.commit(ticket)
        until(lambda: find.num_calls > 1, "another try")
        made.settled()
        assert held_objects(made.tier) == {good[0].object_id}
        assert_all_is_given_back(made)
        made.tier.release([good[0].object_id])
        assert held_objects(made.tier) == frozenset()


def test_an_object_that_no_row_can_hold_keeps_no_other_waiting(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        first, second = chain("p", 2)[:2]
        made.store([first])
        made.try_store(msgspec.structs.replace(second, parents=(first.object_id,) * 2))
        made.store(chain("q", 1))
        made.settled()
        names = [Name(NAMESPACE.attention, planned.object_id) for planned in (first, chain("q", 1)[0])]
        assert len(catalogue_of(made.tier).find(names)) == 2


def test_a_name_that_was_evicted_before_a_reload_serves_again_once_it_is_stored_anew(tmp_path):
    first, second = chain("p", 2)[:2]
    with tier_pair(tmp_path / "root", capacity_bytes=40 * on_disk()) as made:
        made.store([first])
        made.settled()
        catalogue, behind = catalogue_of(made.tier), []
        changes_since = catalogue.changes_since

        def behind_once(*arguments):
            if not behind and not catalogue.find([Name(NAMESPACE.attention, first.object_id)]):
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
