# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be unlinked now: their bytes stay taken, and nothing else goes for them."""

import errno
import os

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import num_turns, stores_in_flight_bytes
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import store_many, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.disk.files.device import Device


def test_while_nothing_can_be_unlinked_nothing_more_is_evicted(tmp_path):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device, capacity_bytes=40 * on_disk()) as made:
        store_many(made, 20, lambda: None)
        made.settled()
        before = made.tier.usage().evicted_objects
        device.faults["unlink"] = errno.EIO
        for turn in range(60):
            done = num_turns(made.tier)
            made.try_store(chain(f"more-{turn}", 1)[0])
            until(lambda done=done: num_turns(made.tier) > done, "a turn of the bookkeeper")
        assert 0 < made.tier.usage().evicted_objects - before < 12
        device.faults.clear()
        made.store(chain("p", 1))


def test_the_bytes_of_a_store_that_was_given_up_stay_taken_until_its_file_is_gone(tmp_path):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("q", 1))
        ticket = made.write(chain("p", 1)[0])
        device.faults["unlink"] = errno.EIO
        made.tier.abort(ticket)
        made.settled()
        assert (len(object_files(made.root)), stores_in_flight_bytes(made.tier)) == (3, on_disk())
        device.faults.clear()
        until(lambda: stores_in_flight_bytes(made.tier) == 0, "room")
        assert len(object_files(made.root)) == 2
    assert counted(made.root)[0] == bytes_under(made.root)


def test_a_store_that_was_given_up_gives_its_bytes_back_though_the_catalogue_was_replaced_meanwhile(tmp_path):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("q", 1))
        (chunk, _) = chain("p", 1)
        ticket = made.write(chunk)
        device.faults["unlink"] = errno.EIO
        made.tier.abort(ticket)
        made.settled()
        (made.root / "catalogue-1.sqlite").unlink()
        until(lambda: counted(made.root)[0] > 0, "the next catalogue")
        device.faults.clear()
        until(lambda: stores_in_flight_bytes(made.tier) == 0, "room")
        until(
            lambda: made.has(chunk) or made.try_store(chunk) == "", "the object"
        )  # a rebuild may have adopted the file
        assert made.reasons([chunk]) == [""]


class OneStuck(Device):
    """The first file that is to go stays for good."""

    path = ""

    def unlink(self, path: str) -> None:
        if path.endswith(".r0") and self.path in ("", path):
            self.path = path
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        super().unlink(path)


def test_one_file_that_can_never_be_unlinked_does_not_stop_the_stores(tmp_path):
    with tier_pair(tmp_path / "root", device=(device := OneStuck()), capacity_bytes=40 * on_disk()) as made:
        store_many(made, 40, lambda: None)
        assert device.path
        assert bytes_under(made.root) <= 40 * on_disk()
        assert made.has(chain("many-39", 2)[2])
