# SPDX-License-Identifier: Apache-2.0
"""What lies under a root, by namespace, without opening any object."""

import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.common.file_lock import is_held
from vllm_overlay.planner.objects import ObjectId, ObjectKind
from vllm_overlay.tiers.disk.checksum import XXH3
from vllm_overlay.tiers.disk.device import is_temporary
from vllm_overlay.tiers.disk.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.namespace import parse_file_name
from vllm_overlay.tiers.disk.ownership import EVERYONE_MAY_WRITE, OTHERS_MAY_WRITE
from vllm_overlay.tiers.disk.root import in_use_path
from vllm_overlay.tiers.disk.scan import FoundFile, namespaces_under, scan_namespace

_LARGEST = 5


@dataclass(slots=True)
class NamespaceUsage:
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


def measure_usage(root: str, but: Collection[str] = ()) -> list[NamespaceUsage]:
    """One summary a namespace, the largest first, ``but`` for these fingerprints. Raises OSError when the root cannot
    be read."""
    os.listdir(root)
    summaries = [_summarize(root, fingerprint) for fingerprint in namespaces_under(root) if fingerprint not in but]
    return sorted(summaries, key=lambda summary: -summary.num_bytes)


def is_made_to_be_shared(root: str, mode: int, has_key: bool) -> bool:
    """Whether its group, and not everyone, may write the root, and a key tells what servers wrote from what others did.

    The key is given, or ``namespace.json`` of some namespace says that its checksums need one.
    """
    if mode & EVERYONE_MAY_WRITE or not mode & OTHERS_MAY_WRITE:
        return False
    manifests = (manifest_or_empty(os.path.join(root, fingerprint)) for fingerprint in namespaces_under(root))
    return has_key or any(manifest.integrity not in ("", XXH3.name) for manifest in manifests)


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
    is_in_use = is_held(in_use_path(root, fingerprint))
    summary = NamespaceUsage(fingerprint, is_in_use, words.model, words.integrity, words.description)
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
