# SPDX-License-Identifier: Apache-2.0
"""Whose objects a directory holds, and where each object's file lies in it."""

import os
import re
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from vllm_overlay.planner.objects import SNAPSHOT_TAG, TAG_PATTERN, ObjectId

DESCRIPTION = "namespace.json"
LEARNED = "learned.json"
INTEGRITY = "integrity"
"""The description's word for the checksums' algorithm and key."""
OBJECT_FORMAT = "object_format"
"""The description's word for the version of the objects' files."""
RESET = "reset"
"""The description's word for the reset that began the namespace."""
MAX_KEY_BYTES = 64
MAX_RANKS = 10_000
FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_TAG = re.compile(TAG_PATTERN)
_FILE_NAME = re.compile(rf"((?:[0-9a-f]{{2}}){{1,64}})\.({TAG_PATTERN})\.r(0|[1-9][0-9]{{0,3}})")


def check_object_id(object_id: ObjectId) -> None:
    """Raise ValueError unless a file name and a header can carry ``object_id``."""
    if not _TAG.fullmatch(object_id.tag):
        raise ValueError(f"{object_id.tag!r} is not a tag of objects")
    if not 1 <= len(object_id.key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(object_id.key)}")


def parse_file_name(name: str) -> tuple[ObjectId, int] | None:
    """The object and rank that a file's name stands for. None when it is no object's."""
    match = _FILE_NAME.fullmatch(name)
    return (ObjectId(match[2], bytes.fromhex(match[1])), int(match[3])) if match else None


def object_path(root: str, fingerprint: str, object_id: ObjectId, rank: int) -> str:
    """The file of one rank of one object in some namespace. Raises ValueError when the name could not be read back."""
    check_object_id(object_id)
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank} is not below {MAX_RANKS}")
    key = object_id.key.hex()
    return os.path.join(root, fingerprint, key[:2], f"{key}.{object_id.tag}.r{rank}")


@dataclass(frozen=True, slots=True)
class DiskNamespace:
    """The two fingerprints, 64 hex digits each, that name one engine's objects, and what they mean in words.

    ``attention`` names chunks, ``snapshot`` names snapshots. ``description`` goes into ``namespace.json``, for people.
    """

    attention: str
    snapshot: str
    description: dict[str, Any]

    def __post_init__(self) -> None:
        for fingerprint in self.fingerprints:
            if not FINGERPRINT.fullmatch(fingerprint):
                raise ValueError(f"fingerprint {fingerprint!r} must be 64 lower-case hex digits")

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The names of this engine's directories under the root."""
        return tuple(dict.fromkeys((self.attention, self.snapshot)))

    @property
    def is_temporary(self) -> bool:
        """Whether a reset began it. When its process is gone, nobody finds it again."""
        return bool(self.description.get(RESET))

    def since(self, reset: str) -> "DiskNamespace":
        """The namespace of this engine since that reset. No file may know its weights, so it belongs to this process
        alone."""
        if not reset:
            return self
        attention, snapshot = (
            blake3(f"{fingerprint}:{reset}".encode()).hexdigest() for fingerprint in (self.attention, self.snapshot)
        )
        return DiskNamespace(attention, snapshot, {**self.description, RESET: reset})

    def fingerprint_of(self, tag: str) -> str:
        return self.snapshot if tag == SNAPSHOT_TAG else self.attention

    def path_of(self, root: str, object_id: ObjectId, rank: int) -> str:
        """The file of one rank of one object. Raises ValueError when the name could not be read back."""
        return object_path(root, self.fingerprint_of(object_id.tag), object_id, rank)
