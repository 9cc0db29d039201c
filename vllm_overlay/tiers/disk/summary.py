# SPDX-License-Identifier: Apache-2.0
"""What lies under a root, by namespace, without opening any object."""

import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.planner.objects import SNAPSHOT_KIND, ObjectId
from vllm_overlay.tiers.disk.ground import in_use_path
from vllm_overlay.tiers.disk.io import is_temporary
from vllm_overlay.tiers.disk.locks import is_held
from vllm_overlay.tiers.disk.namespace import parse_file_name
from vllm_overlay.tiers.disk.scan import FoundFile, namespaces_under, scan_namespace
from vllm_overlay.tiers.disk.words import words_or_none

_LARGEST = 5


@dataclass(slots=True)
class NamespaceSummary:
    """``kinds`` has for each kind of object [objects, files, bytes]; an object has a file a rank.

    ``oldest`` and ``newest`` are seconds since the epoch, None when there is no object. ``largest`` names files and
    bytes. ``other_bytes`` are of files with no object's name: temporaries, or somebody's.
    """

    fingerprint: str
    is_in_use: bool
    model: str
    integrity: str
    description: dict[str, Any]
    kinds: dict[str, list[int]] = field(default_factory=dict)
    num_bytes: int = 0
    temporary_bytes: int = 0
    other_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None
    largest: list[tuple[str, int]] = field(default_factory=list)


def summarize(root: str, but: Collection[str] = ()) -> list[NamespaceSummary]:
    """One summary a namespace, the largest first, ``but`` for these fingerprints. Raises OSError when the root cannot
    be read."""
    os.listdir(root)
    summaries = [_summarize(root, fingerprint) for fingerprint in namespaces_under(root) if fingerprint not in but]
    return sorted(summaries, key=lambda summary: -summary.num_bytes)


def kind_name(kind: str) -> str:
    """A kind of object in words."""
    if kind == SNAPSHOT_KIND:
        return "snapshots"
    return f"chunks of {'full attention' if kind[0] == 'f' else 'sliding window'} group {kind[1:]}"


def _summarize(root: str, fingerprint: str) -> NamespaceSummary:
    top = os.path.join(root, fingerprint)
    words = words_or_none(top)
    is_in_use = is_held(in_use_path(root, fingerprint))
    summary = NamespaceSummary(fingerprint, is_in_use, words.model, words.integrity, words.description)
    objects: set[ObjectId] = set()
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    found: list[FoundFile] = []
    for file in scan_namespace(root, fingerprint):
        if (parsed := parse_file_name(file.name)) is not None:
            objects.add(parsed[0])
            files[parsed[0].kind] += 1
            sizes[parsed[0].kind] += file.num_bytes
            found.append(file)
        elif is_temporary(file.name):
            summary.temporary_bytes += file.num_bytes
        else:
            summary.other_bytes += file.num_bytes
    counts = Counter(object_id.kind for object_id in objects)
    summary.kinds = {kind: [counts[kind], files[kind], sizes[kind]] for kind in sorted(counts)}
    summary.num_bytes = sizes.total()
    if found:
        summary.oldest = min(file.mtime for file in found)
        summary.newest = max(file.mtime for file in found)
    largest = sorted(found, key=lambda file: (-file.num_bytes, file.name))[:_LARGEST]
    summary.largest = [(os.path.relpath(file.path, root), file.num_bytes) for file in largest]
    return summary
