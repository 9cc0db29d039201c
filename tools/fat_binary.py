# SPDX-License-Identifier: Apache-2.0
"""CUDA device code in a shared library: keeps one architecture's and zeroes the rest, which then packs to nothing.

A library holds containers (NVIDIA's "fat binaries"): a header of 16 bytes (magic, version, its own size, the size of
what follows), then entries, each with a header that says its kind, its sizes and its architecture. Nothing moves, so
the library stays as valid as it was; a kernel that is not there is not found when it is asked for.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x50\xed\x55\xba"
PTX, MACHINE_CODE = 1, 2
_CONTAINER = struct.Struct("<4sHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, a version, the header's size, the payload's size; at offset 28 the architecture: 90 for sm_90."""


def keep_architecture(library: bytearray, architecture: int, *, with_ptx: bool) -> Counter[tuple[int, int]]:
    """Zeroes in place the device code that a GPU of ``architecture`` does not run.

    It runs its own machine code. Where a container has none, the driver compiles its PTX of the same or an earlier
    architecture: that stays ``with_ptx``, else such kernels are lost. Returns the bytes kept of every (kind,
    architecture). Raises ValueError for a container that cannot be read, or when nothing of a library is left.
    """
    kept: Counter[tuple[int, int]] = Counter()
    has_device_code = False
    at = library.find(MAGIC)
    while at >= 0:
        _, version, header_bytes, size = _CONTAINER.unpack_from(library, at)
        end = at + header_bytes + size
        if (version, header_bytes) != (1, _CONTAINER.size) or end > len(library):
            at = library.find(MAGIC, at + len(MAGIC))  # the same four bytes in something else
            continue
        has_device_code = True
        entries = list(_entries(library, at + header_bytes, end))
        is_own = {(MACHINE_CODE, architecture)} & {(entry.kind, entry.architecture) for entry in entries}
        for entry in entries:
            is_run = (entry.kind, entry.architecture) == (MACHINE_CODE, architecture)
            is_compiled = with_ptx and not is_own and entry.kind == PTX and entry.architecture <= architecture
            if is_run or is_compiled:
                kept[entry.kind, entry.architecture] += entry.size
            else:
                library[entry.at : entry.at + entry.size] = bytes(entry.size)
        at = library.find(MAGIC, end)
    if has_device_code and not kept:
        raise ValueError(f"nothing for sm_{architecture}")
    return kept


@dataclass(frozen=True, slots=True)
class _Entry:
    """``at`` and ``size`` are of its payload."""

    kind: int
    architecture: int
    at: int
    size: int


def _entries(library: bytearray, at: int, end: int) -> Iterator[_Entry]:
    while at < end:
        kind, _, header_bytes, size, architecture = _ENTRY.unpack_from(library, at)
        payload = at + header_bytes
        if header_bytes < _ENTRY.size or payload + size > end:
            raise ValueError(f"a container's entry at {at:#x} cannot be read")
        yield _Entry(kind, architecture, payload, size)
        at = payload + size
