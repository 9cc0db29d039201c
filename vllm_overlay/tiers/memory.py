# SPDX-License-Identifier: Apache-2.0
"""Host memory cut into equal units: the CPU tier's arena and the disk tier's staging."""

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = 4096
_LARGE_UNIT_BYTES = 1 << 20


class HostBuffer(NamedTuple):
    """An object's bytes in host memory: ``num_bytes`` spread over the rows ``units`` of ``array``, in that order.

    Every row but the last is full. ``array`` has shape (units of the pool, bytes a unit). Its rows are page-aligned
    when the unit is a multiple of 4 KiB, which is what O_DIRECT asks for.
    """

    array: Bytes
    units: tuple[int, ...]
    num_bytes: int

    def segments(self) -> list[Bytes]:
        """The object's bytes as views, in order; their sizes add up to ``num_bytes``."""
        unit_bytes = self.array.shape[1]
        left = self.num_bytes
        views = []
        for unit in self.units:
            take = min(left, unit_bytes)
            views.append(self.array[unit, :take])
            left -= take
        if left:
            raise ValueError(f"{len(self.units)} units of {unit_bytes} bytes do not hold {self.num_bytes} bytes")
        return views


def unit_size(smallest_object_bytes: int) -> int:
    """Bytes of a unit for objects of at least that size: the object itself, or 1 MiB where it is large.

    Where a unit is an object, a chunk is one row, and runs of chunks are runs of rows. Larger objects take any units,
    so nothing fragments.
    """
    return smallest_object_bytes if smallest_object_bytes <= 4 * _LARGE_UNIT_BYTES else _LARGE_UNIT_BYTES


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: the machine's, or what its control groups leave if that is less.

    Files' pages that a group has in the page cache count as free, as the machine's do: it gives them up first.
    """
    available = _numbers(proc / "meminfo")["MemAvailable:"] * 1024
    paths = _control_groups(proc)
    for controller, limit_name, usage_name, prefix in (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        group = cgroup / controller
        for part in ("", *paths.get(controller, "").split("/")):  # "" is the group itself: a container's has no path
            group /= part
            with contextlib.suppress(OSError, ValueError):
                left = int((group / limit_name).read_text()) - int((group / usage_name).read_text())
                with contextlib.suppress(OSError):  # a sandbox that does not say
                    pages = _numbers(group / "memory.stat")
                    left += sum(pages.get(prefix + kind, 0) for kind in ("active_file", "inactive_file"))
                available = min(available, max(0, left))
    return available


def _control_groups(proc: Path) -> dict[str, str]:
    """Controllers -> the path of this process's group; the second version has one for all, named ``""``."""
    with contextlib.suppress(OSError, ValueError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        return {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    return {}


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}


def units_needed(num_bytes: int, unit_bytes: int) -> int:
    """How many units an object of ``num_bytes`` takes."""
    return -(-num_bytes // unit_bytes)


class HostPool:
    """``num_units`` rows of ``unit_bytes`` in one anonymous mapping. It does not know who uses which row.

    The kernel takes huge pages where it has them. Copies then miss the TLB less, and direct I/O goes in fewer, larger
    requests. A forked child does not get the mapping, so a read under way cannot end in a copy of its page.
    """

    def __init__(self, num_units: int, unit_bytes: int) -> None:
        if num_units < 1 or unit_bytes < 1:
            raise ValueError(f"a pool of {num_units} units of {unit_bytes} bytes is empty")
        self.num_units = num_units
        self.unit_bytes = unit_bytes
        self._mapping = mmap.mmap(-1, num_units * unit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel built without it
                self._mapping.madvise(advice)
        flat = np.frombuffer(self._mapping, dtype=np.uint8)
        self.array: Bytes = flat.reshape(num_units, unit_bytes)

    def buffer(self, units: Sequence[int], num_bytes: int) -> HostBuffer:
        """The host buffer of an object that lies in ``units``."""
        return HostBuffer(self.array, tuple(units), num_bytes)


class UnitAllocator:
    """Free rows of a pool: last freed, first taken, so that warm memory is used again. Not thread-safe."""

    def __init__(self, num_units: int) -> None:
        self._free = list(range(num_units - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """``count`` rows, or None when fewer are free (then nothing is taken)."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        return tuple(taken)

    def free(self, units: Sequence[int]) -> None:
        self._free.extend(reversed(units))
