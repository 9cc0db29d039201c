# SPDX-License-Identifier: Apache-2.0
"""Prompts' worth of objects, and the bytes that stand for them."""

import hashlib

import msgspec
import numpy as np

from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.memory import HostBuffer

UNIT = 8192
OBJECT = 3 * UNIT - 1000
GEOMETRY = Geometry.build(
    [
        Group(0, GroupKind.FULL, 64, 10, OBJECT, sliceable=True),
        Group(1, GroupKind.RECURRENT, 64, 0, OBJECT, sliceable=False),
    ],
    64,
    64,
)
"""Of the model whose objects these are."""


def key(*words: object) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


def chain(name: str, length: int, num_bytes: int = OBJECT) -> list[PlannedObject]:
    """A prompt's chunks with a snapshot on the last one, parents first."""
    ids = [ObjectId("f0", key(name, place)) for place in range(length)]
    chunks = [
        PlannedObject(object_id, tuple(ids[max(0, place - 1) : place]), place * 64, place * 64 + 64, num_bytes, 0)
        for place, object_id in enumerate(ids)
    ]
    end = length * 64
    return [*chunks, PlannedObject(ObjectId("s", key(name, "state")), (ids[-1],), end, end, num_bytes)]


def conversations(count: int, shared: int, own: int) -> list[list[PlannedObject]]:
    """Prompts that share their first chunks, each with a snapshot at its end."""
    trunk = chain("system", shared)[:-1]
    prompts = []
    for name in range(count):
        branch = chain(f"user {name}", own)
        first = msgspec.structs.replace(branch[0], parents=(trunk[-1].object_id,))
        prompts.append([*trunk, first, *branch[1:]])
    return prompts


def content(planned: PlannedObject, rank: int) -> np.ndarray:
    """The bytes that stand for an object in one rank."""
    seed = int.from_bytes(key(planned.object_id, rank)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, planned.num_bytes, dtype=np.uint8)


def fill(buffer: HostBuffer, data: np.ndarray) -> None:
    done = 0
    for segment in buffer.segments():
        segment[:] = data[done : done + segment.size]
        done += segment.size


def bytes_of(buffer: HostBuffer) -> np.ndarray:
    return np.concatenate(buffer.segments())
