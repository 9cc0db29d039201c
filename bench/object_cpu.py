# SPDX-License-Identifier: Apache-2.0
"""What one object's file costs a thread in CPU time, user and system: no disk decides that."""

import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.files.checksum import Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import Identity, ObjectHeader
from vllm_overlay.tiers.disk.files.object_file import read_object, seal, write_object
from vllm_overlay.tiers.disk.files.writer import begin_life, path_of
from vllm_overlay.tiers.memory import HostPool, unit_size, units_needed

_TOTAL_BYTES = 256 << 20
_MOST_ROUNDS = 200
_LEAST_ROUNDS = 7


class ObjectCpu(NamedTuple):
    """Microseconds an object, medians. Without the catalogue, queues and locks."""

    write_us: float
    read_us: float


def measure(root: Path, num_bytes: int, integrity: Integrity, direct: bool) -> ObjectCpu:
    """Write, verify and remove objects of one size under ``root``, a new directory, in this thread."""
    root.mkdir(mode=0o700)
    device = Device()
    life = begin_life(str(root), device)
    unit_bytes = unit_size(num_bytes)
    num_units = units_needed(num_bytes, unit_bytes)
    pool = HostPool(num_units, unit_bytes)
    pool.array[:] = 7
    buffer = pool.buffer(range(num_units), num_bytes)
    written, read = [], []
    for number in range(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, _TOTAL_BYTES // num_bytes))):
        object_id, file = ObjectId("f0", os.urandom(32)), File(life.writer, number)
        path = path_of(str(root), file, 0)
        header = ObjectHeader(b"\xaa" * 32, object_id, (object_id,), 0, 64, num_bytes, 0, 1, file)
        identity = Identity(b"\xaa" * 32, object_id, file, 0, 1, num_bytes)
        start = time.thread_time()
        header = header.sealed(seal(buffer, integrity))
        write_object(device, path, header, buffer, direct, integrity)
        between = time.thread_time()
        read_object(device, path, identity, buffer, direct, integrity)
        end = time.thread_time()
        device.unlink(path)
        written.append(between - start)
        read.append(end - between)
    life.end()
    return ObjectCpu(statistics.median(written) * 1e6, statistics.median(read) * 1e6)
