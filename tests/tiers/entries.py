# SPDX-License-Identifier: Apache-2.0
"""Every entry of a tier's index, in whatever state."""

from collections.abc import Mapping

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex


def entries_of(index: PrefixIndex) -> Mapping[ObjectId, Entry]:
    """Only here and in integrity.py do tests read what ``PrefixIndex`` keeps to itself."""
    return index._entries
