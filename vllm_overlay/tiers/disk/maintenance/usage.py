# SPDX-License-Identifier: Apache-2.0
"""What lies under a root, by namespace, without opening any object."""

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.config import ConfigError
from vllm_overlay.planner.objects import ObjectId, ObjectKind
from vllm_overlay.tiers.disk.catalogue import CatalogueError
from vllm_overlay.tiers.disk.catalogue import NamespaceUsage as KnownUsage
from vllm_overlay.tiers.disk.files.device import is_temporary
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.namespace import parse_file_name
from vllm_overlay.tiers.disk.files.scan import FoundFile, namespaces_under, scan_namespace
from vllm_overlay.tiers.disk.maintenance.catalogue_access import open_existing, without_interruption

_LARGEST = 5


@dataclass(slots=True)
class NamespaceUsage:
    """What lies in one namespace.

    ``kinds`` has for each kind of object [objects, files, bytes]. An object has a file a rank. ``largest`` names files
    and bytes. ``other_bytes`` are those of files with no object's name: temporaries, or somebody's.

    ``oldest`` and ``newest`` are the times of files. ``oldest_use`` and ``newest_use`` are those of the last uses of
    objects. All are in seconds since the epoch, and None when there is no object. The catalogue says when objects were
    used and who serves the namespace. Where it cannot be asked, these are None.
    """

    fingerprint: str
    is_in_use: bool | None
    model: str
    integrity: str
    description: dict[str, Any]
    kinds: dict[str, list[int]] = field(default_factory=dict)
    num_bytes: int = 0
    temporary_bytes: int = 0
    other_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None
    oldest_use: int | None = None
    newest_use: int | None = None
    largest: list[tuple[str, int]] = field(default_factory=list)


def measure_usage(root: str) -> list[NamespaceUsage]:
    """One summary a namespace, the largest first. Raises OSError when the root cannot be read."""
    os.listdir(root)
    summaries = [_summarize(root, fingerprint) for fingerprint in namespaces_under(root)]
    _ask_catalogue(root, summaries)
    return sorted(summaries, key=lambda summary: -summary.num_bytes)


def tag_name(tag: str) -> str:
    """A tag in words."""
    object_id = ObjectId(tag, b"")
    if object_id.is_snapshot:
        return "snapshots"
    kind = "full attention" if object_id.kind is ObjectKind.FULL_ATTENTION else "sliding window"
    return f"chunks of {kind} group {object_id.group_index}"


def _summarize(root: str, fingerprint: str) -> NamespaceUsage:
    top = os.path.join(root, fingerprint)
    words = manifest_or_empty(top)
    summary = NamespaceUsage(fingerprint, None, words.model, words.integrity, words.description)
    objects: set[ObjectId] = set()
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    found: list[FoundFile] = []
    for file in scan_namespace(root, fingerprint):
        if (parsed := parse_file_name(file.name)) is not None:
            objects.add(parsed[0])
            files[parsed[0].tag] += 1
            sizes[parsed[0].tag] += file.num_bytes
            found.append(file)
        elif is_temporary(file.name):
            summary.temporary_bytes += file.num_bytes
        else:
            summary.other_bytes += file.num_bytes
    counts = Counter(object_id.tag for object_id in objects)
    summary.kinds = {kind: [counts[kind], files[kind], sizes[kind]] for kind in sorted(counts)}
    summary.num_bytes = sizes.total()
    if found:
        summary.oldest = min(file.mtime for file in found)
        summary.newest = max(file.mtime for file in found)
    largest = sorted(found, key=lambda file: (-file.num_bytes, file.name))[:_LARGEST]
    summary.largest = [(os.path.relpath(file.path, root), file.num_bytes) for file in largest]
    return summary


def _ask_catalogue(root: str, summaries: list[NamespaceUsage]) -> None:
    known = _known_usages(root)
    if known is None:
        return
    for summary in summaries:
        usage = known.get(summary.fingerprint)
        summary.is_in_use = usage is not None and usage.is_served
        if usage is not None:
            summary.oldest_use, summary.newest_use = usage.oldest_use, usage.newest_use


def _known_usages(root: str) -> dict[str, KnownUsage] | None:
    """What the catalogue knows. None where there is none, or none that can be asked: another user's, or a damaged
    one."""
    try:
        with contextlib.ExitStack() as stack:
            opened = open_existing(root)
            if opened is None:
                return None
            stack.enter_context(contextlib.closing(opened))
            return {usage.fingerprint: usage for usage in without_interruption(opened.usage)}
    except (CatalogueError, ConfigError):
        return None
