# SPDX-License-Identifier: Apache-2.0
"""One SQLite file a root that says which objects there are, what they take, and who writes them.

The objects' files are the truth: a row is what we believe. A catalogue that is damaged or lost is rebuilt from them.
"""

from vllm_overlay.tiers.disk.catalogue.errors import Busy, CatalogueError, Damaged, FellBehind, Superseded, Unavailable
from vllm_overlay.tiers.disk.catalogue.eviction import Eviction, Limits, Scored
from vllm_overlay.tiers.disk.catalogue.feed import Changes, Feed, Gone
from vllm_overlay.tiers.disk.catalogue.garbage import GarbageList
from vllm_overlay.tiers.disk.catalogue.generations import replace_damaged
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespace, Namespaces, NamespaceUsage
from vllm_overlay.tiers.disk.catalogue.objects import Committed, Objects
from vllm_overlay.tiers.disk.catalogue.rows import BATCH_ROWS, File, Garbage, StoredObject
from vllm_overlay.tiers.disk.catalogue.writers import HELD_PARTS, Grant, Totals, Writers, limit_bytes

__all__ = [
    "BATCH_ROWS", "HELD_PARTS", "Busy", "Catalogue", "CatalogueError", "Changes", "Committed", "Damaged", "FellBehind",
    "File", "Garbage", "Gone", "Grant", "Limits", "Namespace", "NamespaceUsage", "Scored", "StoredObject",
    "Superseded", "Totals", "Unavailable", "limit_bytes", "replace_damaged",
]  # fmt: skip


class Catalogue(Writers, Namespaces, Objects, Feed, Eviction, GarbageList):
    """What a root's processes know together: objects, bytes, recency, writers. Safe to use from several threads.

    Every call may wait ``timeout_s`` for each of its transactions, so none is made from the scheduler's thread. Every
    call raises CatalogueError (``Damaged``, ``Superseded``, ``Busy``, ``Unavailable``), and ValueError for arguments
    that could not be kept or a call at the wrong time. A call for a writer that has no row any more raises
    ``Superseded``: it joins anew. Times are in seconds since the epoch.
    A long batch is several transactions: after an error its first part may be done.
    """
