# SPDX-License-Identifier: Apache-2.0
"""One machine has a host's sub-root, and another one of the same name is refused until the first is gone."""

import errno
import fcntl
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.lease import RENEW_S, WAIT_S, Lease
from vllm_overlay.tiers.disk.files.marker import MARKER
from vllm_overlay.tiers.disk.files.recognition import LEASE
from vllm_overlay.tiers.disk.files.root import Root


class Time:
    """A clock that goes on only while somebody sleeps. Meanwhile the machines that live renew their leases."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.living: list[Lease] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.living:
            lease.renew()


class Machines:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = Time()

    def lease(self, machine: str, device: Device | None = None) -> Lease:
        root = Root(str(self.path), "wal", self.path.parent.stat().st_dev)
        return Lease(device or Device(), root, machine, self.time.clock, self.time.sleep)

    def taken(self, machine: str) -> Lease:
        made = self.lease(machine)
        made.take()
        return made

    def seconds(self, machine: str) -> float:
        """How long it takes to get the lease."""
        before = self.time.now
        self.taken(machine)
        return self.time.now - before


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def test_a_second_machine_of_a_name_is_refused_with_the_setting_to_change(machines):
    machines.time.living.append(machines.taken("one"))
    with pytest.raises(ConfigError, match=r"same host_name, .*: set host_name to") as refusal:
        machines.taken("other")
    assert str(machines.path) in str(refusal.value)
    assert machines.time.now < 1000 + 2 * RENEW_S + 2
    machines.time.living[0].renew()


def test_the_lease_of_a_machine_that_is_gone_is_taken_over_after_it_stood_still(machines, caplog):
    caplog.set_level(logging.WARNING)
    first = machines.taken("one")
    assert WAIT_S <= machines.seconds("other") <= WAIT_S + 3
    assert f"at most {WAIT_S:.0f} s" in caplog.text
    with pytest.raises(OSError, match="set host_name"):  # it was only away
        for _ in range(2):
            machines.time.sleep(RENEW_S)
            first.renew()


def test_a_lease_that_was_released_needs_no_wait(machines):
    machines.taken("one").release()
    assert machines.seconds("other") <= 2


def test_neither_the_first_nor_the_same_machine_after_a_crash_waits(machines):
    assert machines.seconds("one") <= 2
    assert machines.seconds("one") == 0


def test_engines_of_one_machine_share_the_lease_until_the_last_of_them_ends(machines):
    first, second = machines.taken("one"), machines.taken("one")
    first.release()
    machines.time.living.append(second)
    with pytest.raises(ConfigError, match="host_name"):
        machines.taken("other")
    machines.time.living.clear()
    second.release()
    assert machines.seconds("other") <= 2


def test_an_engine_that_starts_while_the_last_one_gives_the_lease_back_shares_it_soon(machines):
    with (machines.path / LEASE).open("w") as giving_back:
        fcntl.flock(giving_back, fcntl.LOCK_EX)
        first = machines.taken("one")
    machines.time.sleep(RENEW_S)
    first.renew()
    machines.taken("one").release()
    machines.time.living.append(first)
    with pytest.raises(ConfigError, match="host_name"):
        machines.taken("other")


def test_engines_of_one_machine_still_share_it_when_somebody_has_removed_the_file(machines):
    first = machines.taken("one")
    (machines.path / LEASE).unlink()
    machines.time.living.append(first)
    with pytest.raises(OSError, match="is being taken"):
        machines.time.sleep(RENEW_S)
    machines.time.sleep(RENEW_S)
    machines.taken("one").release()
    with pytest.raises(ConfigError, match="host_name"):
        machines.taken("other")


def test_of_two_machines_that_take_it_at_once_one_gets_it(machines):
    other = machines.lease("other")

    class Crossing(Device):
        """Before our first write another machine, which has found the lease free too, writes."""

        def pwritev(self, fd, segments, offset):
            if not machines.time.living:
                machines.time.living.append(other)
                with pytest.raises(OSError, match="taken"):
                    other.renew()
            return super().pwritev(fd, segments, offset)

    one, held = machines.lease("one", Crossing()), []
    for _ in range(4):
        for lease in (one, other):
            try:
                lease.renew()
                held.append(lease)
            except OSError as error:
                assert "set host_name" in str(error) or "taken" in str(error)
        machines.time.now += 1.5
    assert set(held) == {one}


def test_it_is_renewed_only_every_few_seconds(machines):
    lease = machines.taken("one")
    before = (machines.path / LEASE).read_bytes()
    for _ in range(10):
        machines.time.now += RENEW_S / 10 - 0.01
        lease.renew()
    assert (machines.path / LEASE).read_bytes() == before
    machines.time.now += 1
    lease.renew()
    assert (machines.path / LEASE).read_bytes() != before
    assert len((machines.path / LEASE).read_bytes()) == len(before)


def test_a_disk_that_fails_is_no_refusal_and_the_lease_comes_later(machines):
    device = FailingDevice(open=errno.EROFS)
    lease = machines.lease("one", device)
    with pytest.raises(OSError, match="Read-only"):
        lease.take()
    with pytest.raises(OSError, match="Read-only"):
        lease.renew()
    device.faults.clear()
    with pytest.raises(OSError, match="being taken"):
        lease.renew()
    machines.time.now += 2
    lease.renew()


def test_on_a_full_disk_the_machine_that_has_the_lease_goes_on(machines):
    device = FailingDevice()
    lease = machines.lease("one", device)
    lease.take()
    device.faults["pwritev"] = errno.ENOSPC
    for _ in range(3):
        machines.time.now += RENEW_S
        lease.renew()
    (machines.path / LEASE).unlink()  # and who does not have it gets none
    machines.time.now += RENEW_S
    with pytest.raises(OSError, match="No space"):
        lease.renew()


def test_after_an_outage_that_nobody_used_the_machine_goes_on(machines):
    device = FailingDevice()
    lease = machines.lease("one", device)
    lease.take()
    device.faults["open"] = errno.EIO
    machines.time.now += 10 * WAIT_S
    with pytest.raises(OSError, match="Input/output"):
        lease.renew()
    device.faults.clear()
    lease.renew()


def test_what_was_open_on_a_server_that_died_is_closed_once(machines, monkeypatch):
    """Its number is free though the call fails, and may be another file's by then."""
    lease, close = machines.taken("one"), os.close

    def fail(fd):
        is_gone = not os.fstat(fd).st_nlink
        close(fd)
        if is_gone:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(os, "close", fail)
    (machines.path / LEASE).unlink()
    machines.time.now += RENEW_S
    with pytest.raises(OSError, match="being taken"):
        lease.renew()
    machines.time.now += 2
    lease.renew()


def test_a_sub_root_that_was_removed_is_made_again(machines, tmp_path):
    machines.path = tmp_path / "root"
    lease = machines.taken("one")
    assert (machines.path / MARKER).exists()
    shutil.rmtree(machines.path)
    machines.time.now += RENEW_S
    with pytest.raises(OSError, match="being taken"):
        lease.renew()
    machines.time.now += 2
    lease.renew()
    assert (machines.path / MARKER).exists()


@pytest.mark.parametrize("content", [b"\xff" * 300, b"{", b"[]", json.dumps({"machine": 7}).encode()])
def test_what_cannot_be_read_is_waited_for_as_another_machines(machines, content):
    (machines.path / LEASE).write_bytes(content)
    assert WAIT_S <= machines.seconds("one") <= WAIT_S + 3
    assert machines.seconds("one") == 0


def test_a_hosts_name_in_the_lease_does_no_harm_to_the_log(machines):
    (machines.path / LEASE).write_text(json.dumps({"machine": "one", "host": "\x1b[2J\n" * 100, "counter": 1}))
    with pytest.raises(OSError) as refusal:
        machines.lease("other").renew()
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 700 + len(str(machines.path))


def test_nothing_but_the_lease_is_left(machines):
    for name in ("one", "one", "other"):
        machines.taken(name)
    assert [path.name for path in machines.path.iterdir()] == [LEASE]
