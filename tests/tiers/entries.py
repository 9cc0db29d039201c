# SPDX-License-Identifier: Apache-2.0
"""Every entry of a tier's index, in whatever state, and the one that goes next."""

from collections.abc import Mapping, Sequence

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex


def entries_of(index: PrefixIndex) -> Mapping[ObjectId, Entry]:
    """Only here and in integrity.py do tests read what ``PrefixIndex`` keeps to itself."""
    return index._entries


def evict_one(index: PrefixIndex, keep: Sequence[ObjectId] = ()) -> Entry | None:
    """What an index without room for one more byte evicts; None where nothing may go."""
    before, index.capacity_bytes = index.capacity_bytes, index.used_bytes
    try:
        released = index.evict(1, keep)
    finally:
        index.capacity_bytes = before
    return released[0] if released else None
