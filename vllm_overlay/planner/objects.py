# SPDX-License-Identifier: Apache-2.0
"""The names of what a tier keeps: chunks and snapshots.

A full tier has hundreds of thousands of them. So they are structs that the garbage collector leaves alone.
"""

from enum import StrEnum

import msgspec


class ObjectKind(StrEnum):
    """What an object holds; the first letter of its tag."""

    FULL_ATTENTION = "f"
    SLIDING_WINDOW = "w"
    SNAPSHOT = "s"


SNAPSHOT_TAG = ObjectKind.SNAPSHOT.value


def chunk_tag(kind: ObjectKind, index: int) -> str:
    """The tag of the chunks of the ``index``-th attention group of a model."""
    return f"{kind}{index}"


class ObjectId(msgspec.Struct, frozen=True, order=True, gc=False):
    """Names one object of a tier.

    ``tag`` is ``f<n>`` for a chunk of the n-th attention group when that group is full attention, ``w<n>`` when it is a
    sliding window, and ``s`` for a snapshot.

    ``key`` is vLLM's chained block hash of the prompt up to the object's last token. It stands for everything before it
    too, and for media and cache salt. With a LoRA adapter it is what the adapter's weights make of that hash.
    """

    tag: str
    key: bytes

    @property
    def kind(self) -> ObjectKind:
        return ObjectKind(self.tag[0])

    @property
    def is_snapshot(self) -> bool:
        return self.tag == SNAPSHOT_TAG

    @property
    def group_index(self) -> int | None:
        """Which attention group of the model it is a chunk of; None for a snapshot."""
        return int(self.tag[1:]) if self.tag[1:] else None


class PlannedObject(msgspec.Struct, frozen=True, gc=False):
    """One object to store or to load, as the planner names it.

    ``start_tokens`` and ``end_tokens`` bound the tokens whose attention KV it holds. A snapshot's ``end_tokens`` is its
    boundary, and its ``start_tokens`` the last chunk boundary at or below that. ``parents`` must be in the tier before
    it. ``num_bytes`` is its size in one rank. ``group_id`` is vLLM's KV cache group, None for a snapshot.
    """

    object_id: ObjectId
    parents: tuple[ObjectId, ...]
    start_tokens: int
    end_tokens: int
    num_bytes: int
    group_id: int | None = None
