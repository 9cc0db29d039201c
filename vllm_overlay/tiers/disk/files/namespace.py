# SPDX-License-Identifier: Apache-2.0
"""Whose objects are whose: one namespace a model, and how its objects are called on the disk."""

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from vllm_overlay.planner.objects import SNAPSHOT_TAG, ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue.rows import MAX_KEY_BYTES, Fingerprint, check_value
from vllm_overlay.tiers.disk.catalogue.schema import MAX_WORDS_BYTES

INTEGRITY = "integrity"
"""The description's word for the checksums' algorithm and key."""
OBJECT_FORMAT = "object_format"
"""The description's word for the version of the objects' files."""
_NEEDED = ("model", INTEGRITY)
_KIND = re.compile(r"s[0-9a-f]{16}|[fw][0-9]{1,3}")
_FACTS_DIGITS = 16


def check_stored_id(stored: ObjectId) -> None:
    """Raise ValueError unless a header can carry the name of a stored object."""
    if not _KIND.fullmatch(stored.tag) or not 1 <= len(stored.key) <= MAX_KEY_BYTES:
        raise ValueError(f"{stored!r} is not the name of a stored object")


@dataclass(frozen=True, slots=True)
class DiskNamespace:
    """What one engine's objects depend on, and what that means in words.

    ``fingerprint`` (of chunks) and ``snapshot`` have 64 hex digits each. The first is the namespace. Of the second 16
    digits are part of a snapshot's *kind*: engines whose states differ share their chunks. ``is_private``: a reset
    began it, and no file may know its weights, so it belongs to one life of one engine.
    """

    fingerprint: str
    snapshot: str
    description: dict[str, Any]
    is_private: bool = False

    def __post_init__(self) -> None:
        check_value(Fingerprint, self.fingerprint, self.snapshot)

    @property
    def snapshot_kind(self) -> str:
        return f"{SNAPSHOT_TAG}{self.snapshot[:_FACTS_DIGITS]}"

    @property
    def words(self) -> str:
        """For people: JSON. Of a description that is too long for a catalogue, what tools need."""
        words = json.dumps(self.description, default=str)
        if len(words) <= MAX_WORDS_BYTES:
            return words
        return json.dumps({name: self.description.get(name, "") for name in _NEEDED} | {"all else": "too long to keep"})

    def since(self, reset: str) -> "DiskNamespace":
        """The namespace of this engine since the reset of that name."""
        fingerprint = blake3(f"{self.fingerprint}:{reset}".encode()).hexdigest()
        return DiskNamespace(fingerprint, self.snapshot, self.description, is_private=True)

    def stored_id(self, object_id: ObjectId) -> ObjectId:
        """What an object of this engine is called on the disk."""
        return ObjectId(self.snapshot_kind, object_id.key) if object_id.tag == SNAPSHOT_TAG else object_id

    def own_id(self, stored: ObjectId) -> ObjectId | None:
        """What a stored object is called in this engine. None for a snapshot of another one's."""
        if not stored.tag.startswith(SNAPSHOT_TAG):
            return stored
        return ObjectId(SNAPSHOT_TAG, stored.key) if stored.tag == self.snapshot_kind else None

    def stored(self, planned: PlannedObject) -> PlannedObject:
        """The object with the names of the disk."""
        parents = tuple(map(self.stored_id, planned.parents))
        return msgspec.structs.replace(planned, object_id=self.stored_id(planned.object_id), parents=parents)

    def own(self, stored: PlannedObject) -> PlannedObject | None:
        """The object with the names of this engine. None where it is not this engine's."""
        if not stored.object_id.tag.startswith(SNAPSHOT_TAG):
            return stored  # nothing but snapshots hangs on a snapshot
        object_id, parents = self.own_id(stored.object_id), [self.own_id(parent) for parent in stored.parents]
        known = tuple(parent for parent in parents if parent is not None)
        if object_id is None or len(known) < len(parents):
            return None
        return msgspec.structs.replace(stored, object_id=object_id, parents=known)
