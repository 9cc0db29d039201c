# SPDX-License-Identifier: Apache-2.0
"""One SQLite file a root that says which objects there are, what they take, and who writes them.

The objects' files are the truth: a row is what we believe. A catalogue that is damaged or lost is rebuilt from them.
"""

from vllm_overlay.tiers.disk.catalogue.catalogue import BATCH_ROWS, Catalogue
from vllm_overlay.tiers.disk.catalogue.errors import (
    Busy,
    CatalogueError,
    Damaged,
    FellBehind,
    Superseded,
    Unavailable,
)
from vllm_overlay.tiers.disk.catalogue.eviction import Limits, Scored
from vllm_overlay.tiers.disk.catalogue.feed import Changes, Gone
from vllm_overlay.tiers.disk.catalogue.generations import replace_damaged
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespace, NamespaceUsage
from vllm_overlay.tiers.disk.catalogue.objects import Committed, Refusal
from vllm_overlay.tiers.disk.catalogue.rows import File, Garbage, StoredObject
from vllm_overlay.tiers.disk.catalogue.writers import HELD_PARTS, Grant, Totals, WriterRow, limit_bytes

__all__ = [
    "BATCH_ROWS",
    "HELD_PARTS",
    "Busy",
    "Catalogue",
    "CatalogueError",
    "Changes",
    "Committed",
    "Damaged",
    "FellBehind",
    "File",
    "Garbage",
    "Gone",
    "Grant",
    "Limits",
    "Namespace",
    "NamespaceUsage",
    "Refusal",
    "Scored",
    "StoredObject",
    "Superseded",
    "Totals",
    "Unavailable",
    "WriterRow",
    "limit_bytes",
    "replace_damaged",
]
