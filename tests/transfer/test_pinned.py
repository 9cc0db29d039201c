# SPDX-License-Identifier: Apache-2.0
"""Host memory is registered whole or not at all, in parts that end with a unit, and given back once."""

import logging
import math
from collections.abc import Callable

import pytest

from tests.logged import logged_by
from vllm_overlay.tiers.memory import PAGE_BYTES, HostPool
from vllm_overlay.transfer import pinned as pinned_memory
from vllm_overlay.transfer.pinned import PinnedMemory


class Function:
    """One of a library's, called through its declared types."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.argtypes: tuple[type, ...] = ()

    def __call__(self, *arguments: int) -> int:
        assert len(arguments) == len(self.argtypes)
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            assert kind(argument).value == argument
        return self._call(*arguments)


class FakeDriver:
    """Refuses the part of this number."""

    def __init__(self, refuses: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self._refuses = refuses
        self.cuMemHostRegister_v2 = Function(self._register)
        self.cuMemHostUnregister = Function(self._unregister)

    def _register(self, address: int, size: int, flags: int) -> int:
        assert flags == 0 and address % PAGE_BYTES == 0
        assert not any(at < address + size and address < at + other for at, other in self.registered.items())
        self.calls += 1
        if self.calls - 1 == self._refuses:
            return 2
        self.registered[address] = size
        return 0

    def _unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("unit_bytes", [PAGE_BYTES, 1000, 3 * PAGE_BYTES, PAGE_BYTES + 512])
@pytest.mark.parametrize("max_part_bytes", [1, 1 << 20, 1 << 40])
def test_every_unit_is_in_one_part(unit_bytes: int, max_part_bytes: int) -> None:
    pool, driver = HostPool(700, unit_bytes), FakeDriver()
    pinned = PinnedMemory(pool.array, max_part_bytes=max_part_bytes, library=driver)
    assert pinned.is_pinned
    assert sum(driver.registered.values()) == pool.array.nbytes
    for row in pool.array:
        start, end = row.ctypes.data, row.ctypes.data + unit_bytes
        assert len([at for at, size in driver.registered.items() if at <= start and end <= at + size]) == 1
    shortest = math.lcm(unit_bytes, PAGE_BYTES)
    assert max(driver.registered.values()) <= max(max_part_bytes, shortest)


def test_parts_are_no_larger_than_allowed() -> None:
    driver = FakeDriver()
    PinnedMemory(HostPool(10, 3 * PAGE_BYTES).array, max_part_bytes=10 * PAGE_BYTES, library=driver)
    assert list(driver.registered.values()) == [9 * PAGE_BYTES] * 3 + [3 * PAGE_BYTES]


@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_part_that_is_refused_takes_all_others_back(refused: int, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(refused)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedMemory(HostPool(4, PAGE_BYTES).array, max_part_bytes=PAGE_BYTES, library=driver)
    assert not pinned.is_pinned and driver.registered == {} and driver.calls == refused + 1
    (message,) = [record.getMessage() for record in logged_by(pinned_memory, caplog)]
    assert "error 2" in message


def test_it_is_given_back_once() -> None:
    driver = FakeDriver()
    pinned = PinnedMemory(HostPool(4, PAGE_BYTES).array, max_part_bytes=PAGE_BYTES, library=driver)
    assert len(driver.registered) == 4
    pinned.unregister()
    pinned.unregister()
    assert driver.registered == {} and not pinned.is_pinned
