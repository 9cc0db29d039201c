# SPDX-License-Identifier: Apache-2.0
"""What the scheduler has decided about objects, for the bookkeeper to carry out in order."""

import msgspec

from vllm_overlay.tiers.disk.catalogue import File, StoredObject
from vllm_overlay.tiers.disk.updates import ServedNamespace


class Stored(msgspec.Struct, frozen=True, gc=False):
    """All ranks' files of an object are in place. The files of its ``parents`` are held, and its bytes taken from the
    room."""

    served: ServedNamespace
    item: StoredObject
    parents: tuple[File, ...]
    replaces: File | None = None


class Discarded(msgspec.Struct, frozen=True, gc=False):
    """A store has failed, or nobody wants its object. What it left is to be unlinked, unless something names it."""

    served: ServedNamespace
    file: File
    world_size: int
    num_bytes: int
    parents: tuple[File, ...]


class Moved(msgspec.Struct, frozen=True, gc=False):
    """From here on another namespace is served."""

    served: ServedNamespace


Step = Stored | Discarded | Moved


def discarded(step: Stored) -> Discarded:
    """The step for a store that the catalogue did not take."""
    return Discarded(step.served, step.item.file, step.item.world_size, step.item.num_bytes, step.parents)
