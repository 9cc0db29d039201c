# SPDX-License-Identifier: Apache-2.0
"""One SQLite file a root that says which objects there are, what they take, and who uses them.

The objects' files are the truth: a row is what we believe. A catalogue that is damaged or lost is rebuilt from them.
"""

from vllm_overlay.tiers.disk.catalogue.catalogue import BATCH_ROWS, Catalogue
from vllm_overlay.tiers.disk.catalogue.changes import Changes
from vllm_overlay.tiers.disk.catalogue.commit import Commit, Refusal
from vllm_overlay.tiers.disk.catalogue.errors import (
    Busy,
    CatalogueError,
    Damaged,
    FellBehind,
    Superseded,
    Unavailable,
)
from vllm_overlay.tiers.disk.catalogue.eviction import Limits
from vllm_overlay.tiers.disk.catalogue.generations import replace_damaged
from vllm_overlay.tiers.disk.catalogue.grants import Grant, limit_bytes
from vllm_overlay.tiers.disk.catalogue.members import DeadMember
from vllm_overlay.tiers.disk.catalogue.rows import Name, Namespace, RemovedObject, Scored, StoredObject
from vllm_overlay.tiers.disk.catalogue.totals import Totals
from vllm_overlay.tiers.disk.catalogue.usage import NamespaceUsage

__all__ = [
    "BATCH_ROWS",
    "Busy",
    "Catalogue",
    "CatalogueError",
    "Changes",
    "Commit",
    "Damaged",
    "DeadMember",
    "FellBehind",
    "Grant",
    "Limits",
    "Name",
    "Namespace",
    "NamespaceUsage",
    "Refusal",
    "RemovedObject",
    "Scored",
    "StoredObject",
    "Superseded",
    "Totals",
    "Unavailable",
    "limit_bytes",
    "replace_damaged",
]
