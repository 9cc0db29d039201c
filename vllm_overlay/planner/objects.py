# SPDX-License-Identifier: Apache-2.0
"""The names of what a tier keeps: chunks and snapshots.

A full tier has hundreds of thousands of them, so they are structs that the garbage collector passes by.
"""

import msgspec

SNAPSHOT_KIND = "s"


class ObjectId(msgspec.Struct, frozen=True, order=True, gc=False):
    """Names one object of a tier.

    ``kind`` is ``f<n>`` for a chunk of the n-th attention group when that group is full attention, ``w<n>`` when it
    is a sliding window, and ``s`` for a snapshot. ``key`` is vLLM's chained block hash of the prompt up to the
    object's last token, so it stands for everything before it too (and for media and cache salt), or what the weights
    of a LoRA adapter make of that hash.
    """

    kind: str
    key: bytes


class PlannedObject(msgspec.Struct, frozen=True, gc=False):
    """One object to store or to load, as the planner names it.

    ``start_tokens`` and ``end_tokens`` bound the tokens whose attention KV it holds; a snapshot's ``end_tokens`` is
    its boundary and its ``start_tokens`` the last chunk boundary at or below it. ``parents`` must be in the tier
    before it. ``num_bytes`` is its size in one rank. ``group_id`` is vLLM's KV cache group, None for a snapshot.
    """

    object_id: ObjectId
    parents: tuple[ObjectId, ...]
    start_tokens: int
    end_tokens: int
    num_bytes: int
    group_id: int | None = None
