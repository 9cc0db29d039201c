# SPDX-License-Identifier: Apache-2.0
"""What a touched file of a tree is, and whether a patch is in it."""

from enum import StrEnum


class FileState(StrEnum):
    """What a touched file is, by its SHA-256."""

    ORIGINAL = "original"
    PATCHED = "patched"
    HALF = "half patched"
    OUTDATED = "patched by another series"
    LOST = "patched by another series, original lost"
    EDITED = "edited"
    OTHER_VERSION = "of another vLLM"
    MISSING = "missing"
    UNREADABLE = "unreadable"

    @property
    def hinders(self) -> bool:
        """Whether ``apply`` and ``reverse`` refuse a tree with such a file: they do not know its original."""
        return self in _HINDERING


_HINDERING = frozenset(
    {FileState.LOST, FileState.EDITED, FileState.OTHER_VERSION, FileState.MISSING, FileState.UNREADABLE}
)


class PatchState(StrEnum):
    """Whether a patch is in a tree, by the states of the files it touches."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    HALF = "half applied"
    UNKNOWN = "unknown"
