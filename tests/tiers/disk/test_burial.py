# SPDX-License-Identifier: Apache-2.0
"""What processes that ended left behind, and the namespaces of living ones, while somebody looks after the dead."""

import errno
import os
import threading
import time

import pytest

from tests.tiers.disk.devices import GatedDevice
from tests.tiers.disk.files import bytes_under, counted, object_files
from tests.tiers.disk.inside import catalogue_of, delay_bookkeeper, room_bytes
from tests.tiers.disk.objects import OBJECT, chain, content, fill
from tests.tiers.disk.reset import is_serving_another, store_after_reset
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from tests.waiting import PATIENCE_S, until
from vllm_overlay.tiers.disk.catalogue import Busy, Catalogue, Name, replace_damaged
from vllm_overlay.tiers.disk.maintenance import recovery


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(recovery, "DEATH_SETTLES_S", 0.2)
    monkeypatch.setattr(recovery, "PAUSE_S", 0.3)


def let_one_die(root):
    """A process that was killed before it stored anything."""
    catalogue = Catalogue(str(root))
    catalogue.join([], int(time.time()))
    catalogue.close()


def test_files_that_cannot_be_asked_for_while_the_dead_are_buried_are_not_gone(tmp_path, monkeypatch):
    lstat = os.lstat

    def failing(path, **how):
        if str(path).endswith(".r0") and threading.current_thread().name == "disk-recovery":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return lstat(path, **how)

    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        made.store(chain("p", 5))
        made.settled()
        monkeypatch.setattr("os.lstat", failing)
        let_one_die(made.root)
        until(lambda: not catalogue_of(made.tier).dead_members(), "a burial")
        assert all(made.settled().coverage(chain("p", 5)))
        assert len(object_files(made.root)) == 6


def test_what_a_dead_process_wanted_to_unlink_is_stored_anew_by_one_heir_while_another_is_slow(tmp_path, monkeypatch):
    planned = chain("p", 1)[0]
    bury, is_late, go_on = recovery.Recovery._bury, threading.Event(), threading.Event()

    def bury_late(self, member):
        if self._catalogue is catalogue_of(slow.tier):
            is_late.set()
            assert go_on.wait(PATIENCE_S)
        assert is_late.wait(PATIENCE_S)
        bury(self, member)

    with tier_pair(tmp_path / "root") as made, tier_pair(tmp_path / "root") as slow:
        made.recovered()
        slow.recovered()
        made.store([planned])
        made.settled()
        monkeypatch.setattr(recovery.Recovery, "_bury", bury_late)
        dying = Catalogue(str(made.root))
        dying.join([], int(time.time()))
        list(dying.remove([Name(NAMESPACE.attention, planned.object_id)]))
        dying.close()
        assert is_late.wait(PATIENCE_S)
        until(lambda: made.tier.advance() or (not made.has(planned) and not catalogue_of(made.tier).dead_members()))
        made.store([planned])
        go_on.set()
        slow.close()  # waits for its recovery
        assert made.reasons([planned]) == [""]


def test_the_file_of_a_store_that_outlives_its_process_is_looked_after(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "DEATH_SETTLES_S", 1000)
    planned, device = chain("p", 1)[0], GatedDevice("pwritev")
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        with tier_pair(made.root, device=device) as ending:
            until(lambda: ending.tier.advance() or room_bytes(ending.tier) >= OBJECT, "room")
            ticket = ending.tier.reserve(planned)
            buffer = ending.workers[0].begin_store(ticket)
            fill(buffer, content(planned, 0))
            ending.workers[0].submit_store(ticket, buffer)
            assert device.waiting.acquire(timeout=PATIENCE_S)
            ending.tier.close()
            (dead,) = catalogue_of(made.tier).dead_members()
            device.gate.set()
            until(lambda: ending.workers[0].poll()[0], "the file")
        assert set(dead.fingerprints) == set(NAMESPACE.fingerprints)
        monkeypatch.setattr(recovery, "DEATH_SETTLES_S", 0)
        until(lambda: not catalogue_of(made.tier).dead_members(), "a burial")
        until(lambda: made.tier.advance() or made.has(planned), "its object")
        assert counted(made.root)[0] == bytes_under(made.root) > 0


@pytest.mark.parametrize("is_one_dead", [False, True])
def test_after_the_catalogue_was_replaced_what_a_reset_process_stored_stays_until_it_has_joined(
    tmp_path, monkeypatch, is_one_dead
):
    look, looks = recovery.Recovery._look_after_dead, []
    monkeypatch.setattr(
        recovery.Recovery, "_look_after_dead", lambda self: look(self) and not looks.append(self._catalogue)
    )
    with tier_pair(tmp_path / "root") as made, tier_pair(tmp_path / "root") as other:
        made.tier.clear()
        until(lambda: is_serving_another(made))
        store_after_reset(made, chain("p", 1)[0])
        made.settled()
        other.recovered()
        files = object_files(made.root)
        with delay_bookkeeper(made.tier):
            old = catalogue_of(other.tier)
            replace_damaged(str(made.root), old.generation)
            until(lambda: any(looks.count(each) > 2 for each in looks if each.generation > old.generation), "looks")
            if is_one_dead:
                let_one_die(made.root)
                until(lambda: not catalogue_of(other.tier).dead_members(), "a burial")
            assert object_files(made.root) == files
        until(lambda: catalogue_of(other.tier).totals().num_members == 2)
        until(lambda: made.tier.advance() or made.has(chain("p", 1)[0]), "what it had")
        assert object_files(made.root) == files


def test_what_nobody_serves_any_more_goes_though_the_catalogue_is_busy_meanwhile(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        made.tier.clear()
        until(lambda: is_serving_another(made))
        store_after_reset(made, chain("p", 1)[0])
        made.settled()
        catalogue, faults = catalogue_of(made.tier), []
        end_removal = catalogue.end_removal

        def busy_once(*arguments):
            if not faults and threading.current_thread().name == "disk-recovery":
                faults.append(Busy("once"))
                raise faults[0]
            return end_removal(*arguments)

        catalogue.end_removal = busy_once
        made.tier.clear()
        until(lambda: faults and counted(made.root)[0] == 0 == bytes_under(made.root), "an end of what was before")
