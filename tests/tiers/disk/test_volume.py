# SPDX-License-Identifier: Apache-2.0
"""A file system that has less than the settings promise is said, once and with values that work."""

import pytest

from tests.tiers.disk.devices import SmallDevice
from tests.tiers.disk.files import on_disk
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import tier_pair
from tests.waiting import until
from vllm_overlay.config import GIB, MIB
from vllm_overlay.tiers.disk.volume import Quota, Volume

LARGEST = 4 * MIB
DEFAULTS = Quota(20 * GIB, GIB, LARGEST)


@pytest.mark.parametrize(
    ("quota", "total", "free", "own", "words"),
    [
        (DEFAULTS, 100 * GIB, 90 * GIB, 0, ""),
        (DEFAULTS, 100 * GIB, 2 * GIB, 19 * GIB, ""),
        (  # a claim of 10 GiB, new
            DEFAULTS, 10 * GIB, 10 * GIB, 0,
            "/kv holds at most 9GiB of capacity_bytes=20GiB: its file system has 10GiB, of which others use "
            "0B and min_free_bytes=1GiB stay free. Set capacity_bytes to at most 9GiB, or root to a larger "
            "file system",
        ),
        (  # a disk that others use too, and what this tier has there already
            DEFAULTS, 100 * GIB, 6 * GIB, 3 * GIB,
            "/kv holds at most 8GiB of capacity_bytes=20GiB: its file system has 100GiB, of which others use "
            "91GiB and min_free_bytes=1GiB stay free. Set capacity_bytes to at most 8GiB, or root to a "
            "larger file system",
        ),
        (
            DEFAULTS, 100 * GIB, GIB, 0,
            "nothing can be stored under /kv now: its file system has 100GiB, of which others use 99GiB and "
            "min_free_bytes=1GiB stay free. Free 9MiB there, or set min_free_bytes lower",
        ),
        (  # a claim of 512 MiB
            DEFAULTS, 512 * MIB, 512 * MIB, 0,
            "nothing can be stored under /kv: its file system has 512MiB, and min_free_bytes=1GiB of it stay free. "
            "Set min_free_bytes to 64MiB and capacity_bytes to at most 448MiB, or root to a larger file system",
        ),
        (  # a container's /dev/shm, and states of tens of megabytes
            Quota(20 * GIB, GIB, 40 * MIB), 64 * MIB, 64 * MIB, 0,
            "nothing can be stored under /kv: its file system has 64MiB, and two of this model's largest objects take "
            "80MiB. Set root to a larger file system",
        ),
    ],
)  # fmt: skip
def test_what_is_less_than_promised_is_said_with_values_that_work(
    quota: Quota, total: int, free: int, own: int, words: str
) -> None:
    volume = Volume(free, own)
    assert volume.shortage(quota, "/kv", total) == words
    assert (volume.usable_bytes(quota) < quota.capacity_bytes) == bool(words)


def test_the_values_that_it_names_work() -> None:
    volume = Volume(512 * MIB)
    assert "Set min_free_bytes to 64MiB and capacity_bytes to at most 448" in volume.shortage(DEFAULTS, "/", 512 * MIB)
    assert volume.shortage(Quota(448 * MIB, 64 * MIB, LARGEST), "/", 512 * MIB) == ""


def test_a_volume_below_the_space_to_keep_is_said_and_has_no_capacity(tmp_path, said):
    device = SmallDevice(64 * MIB)
    with tier_pair(tmp_path / "root", device=device, min_free_bytes="1 GiB", capacity_bytes="200 GiB") as made:
        until(lambda: said("nothing can be stored under"), "a word of it")
        assert "Set min_free_bytes to 8MiB and capacity_bytes to at most 56MiB" in said("nothing can be")[0]
        until(lambda: made.tier.usage().capacity_bytes == 0, "no capacity")
        assert made.try_store(chain("p", 1)[0]) == "no_room"
        made.turned()
        assert len(said("nothing can be stored under")) == 1


def test_the_capacity_is_what_the_volume_has_and_follows_it(tmp_path, said):
    device = SmallDevice(64 * MIB)
    with tier_pair(tmp_path / "root", device=device, min_free_bytes="8 MiB", capacity_bytes="200 GiB") as made:
        until(lambda: made.tier.usage().capacity_bytes == 56 * MIB, "what the volume has")
        made.store(chain("p", 1))
        device.free -= 2 * on_disk() + 16 * MIB
        until(lambda: made.turned().tier.usage().capacity_bytes == 40 * MIB, "what others leave")
        device.free += 16 * MIB
        until(lambda: made.turned().tier.usage().capacity_bytes == 56 * MIB, "what the volume has")
        assert len(said("Set capacity_bytes to at most 56MiB")) == 1
        assert len(said("stay free")) == 1


def test_a_volume_that_is_large_enough_is_not_spoken_of(tmp_path, said):
    with tier_pair(tmp_path / "root", device=SmallDevice(64 * MIB), capacity_bytes="8 MiB") as made:
        made.store(chain("p", 1))
        assert made.tier.usage().capacity_bytes == 8 * MIB
        assert said("file system") == []


def test_a_tier_without_a_root_to_work_in_has_no_capacity_until_it_has_one(tmp_path, said):
    with tier_pair(tmp_path / "root", capacity_bytes="8 MiB") as made:
        made.store(chain("p", 1))
        made.root.rename(tmp_path / "elsewhere")
        made.root.write_text("somebody's")
        until(lambda: made.tier.usage().capacity_bytes == 0, "no capacity")
        made.root.unlink()
        until(lambda: made.tier.usage().capacity_bytes == 8 * MIB, "its capacity")
