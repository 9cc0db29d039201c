# SPDX-License-Identifier: Apache-2.0
"""How a tier opens its root, what it does when that goes, and which settings it refuses."""

import dataclasses
import errno
import logging
import os
import subprocess
import sys

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.file_systems import disk
from tests.tiers.disk.files import on_disk
from tests.tiers.disk.foreign import make_foreign, state_of
from tests.tiers.disk.inside import catalogue_of, delay_bookkeeper
from tests.tiers.disk.objects import chain
from tests.tiers.disk.processes import REPOSITORY
from tests.tiers.disk.roots import HALVES, open_tier
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair, tier_pair
from tests.waiting import until
from vllm_overlay.common.file_lock import is_held
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import Busy, Catalogue
from vllm_overlay.tiers.disk.recovery.inspection import description_of
from vllm_overlay.tiers.disk.recovery.recovery import Recovery

OPEN_MANY = """
import sys
from pathlib import Path
from tests.tiers.disk import roots

def size():
    return Path("/proc/self/status").read_text().partition("FDSize:")[2].split()[0]

getattr(roots, sys.argv[1])(sys.argv[2])
before = size()
files = [open("/dev/null") for _ in range(500)]
print(before, size())
"""


@HALVES
def test_no_file_that_is_opened_later_makes_the_table_of_open_files_grow(tmp_path, start):
    """Who opens one that does waits for the kernel, for as long as ranks poll each other on every core."""
    command = [sys.executable, "-c", OPEN_MANY, start.__name__, str(tmp_path / "root")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after


@HALVES
def test_a_directory_that_is_no_root_is_refused_by_both_halves(tmp_path, start):
    directory = make_foreign(tmp_path / "theirs", "project")
    before = state_of(directory)
    with pytest.raises(ConfigError, match=r"root=.*empty directory"):
        start(directory)
    assert state_of(directory) == before


def test_a_root_whose_path_is_not_utf_8_or_a_link_is_a_root(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "vllm_overlay")  # a report of a test cannot carry what the log says of the path
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for root in (tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "link"):
        with tier_pair(root) as made:
            made.recovered().store(chain("p", 1))
            assert made.reasons(chain("p", 1)) == ["", ""]


def test_a_policy_of_somebody_is_refused_because_no_other_process_knows_it(tmp_path):
    with pytest.raises(ConfigError, match='set it to "learned" or "lru"'):
        open_tier(tmp_path / "root", eviction_policy="vllm_overlay.tiers.policies.lru:LeastRecentlyUsed")


def test_a_capacity_below_two_objects_is_refused_with_one_that_works(tmp_path):
    with pytest.raises(ConfigError, match="capacity_bytes") as refusal:
        open_tier(tmp_path / "root", capacity_bytes=on_disk())
    open_tier(tmp_path / "root", capacity_bytes=int(str(refusal.value).split()[-1]))


@pytest.mark.parametrize(("kind", "call"), [(Catalogue, "join"), (Recovery, "start")])
def test_a_start_that_is_tried_again_has_one_life(tmp_path, monkeypatch, kind, call):
    works, left, lives = getattr(kind, call), [1, 2, 3], set()

    def fails(*arguments):
        lives.update(tmp_path.glob("root/*/alive"))
        if left:
            raise Busy(f"for turn {left.pop()} of 3")
        return works(*arguments)

    monkeypatch.setattr(kind, call, fails)
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        assert len(lives) == 1
        assert [is_held(str(path)) for path in lives] == [True]


def test_a_model_whose_description_is_too_long_to_keep_has_a_tier(tmp_path):
    """As of a checkpoint that lists each expert's layer."""
    namespace = dataclasses.replace(NAMESPACE, description={**NAMESPACE.description, "config": "x" * (1 << 16)})
    with tier_pair(tmp_path / "root", namespace=namespace) as made:
        made.recovered().store(chain("p", 1))
        (usage,) = catalogue_of(made.tier).usage()
    assert description_of(usage).items() >= NAMESPACE.description.items()


# A disk that takes nothing at start.


def test_a_disk_that_takes_nothing_for_long_is_no_flood_in_the_log(tmp_path, caplog):
    """Each turn of the bookkeeper asks for the root again."""
    device = FailingDevice(open=errno.EROFS)
    made = TierPair(tmp_path / "root", device=device)
    for _ in range(3):
        made.turned()
    assert len([message for message in caplog.messages if "takes no file now" in message]) <= 1
    device.faults.clear()
    made.close()


def test_a_read_only_disk_at_start_is_not_fatal_and_comes_back(tmp_path):
    with disk(tmp_path / "disk") as made_disk:
        root = made_disk.path / "root"
        with tier_pair(root) as made:
            made.recovered().store(chain("p", 1))
        made_disk.let_write(False)
        with tier_pair(root) as made:
            assert made.turned().try_store(chain("q", 1)[0]) == "no_room"
            made_disk.let_write(True)
            made.recovered().store(chain("q", 1))
            assert made.reasons(chain("p", 1) + chain("q", 1)) == [""] * 4


# A root that goes while it is used.


def test_a_strangers_directory_in_the_roots_place_is_left_alone_also_by_a_store_under_way(tmp_path, said):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        ticket = until(lambda: made.tier.reserve(chain("q", 1)[0]), "room")
        with delay_bookkeeper(made.tier):  # before anybody makes another root there
            made.root.rename(made.root.with_name("was"))
            make_foreign(made.root, "project")
            before = state_of(made.root)
        assert made.why_not_written(ticket)
        made.tier.abort(ticket.ticket)
        until(lambda: said("empty directory"), "the bookkeeper's word of it")
        assert made.try_store(chain("q", 1)[0]) == "no_room"
        assert state_of(made.root) == before
