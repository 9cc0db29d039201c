# SPDX-License-Identifier: Apache-2.0
"""What a touched file of a tree is, by its SHA-256."""

from enum import StrEnum


class FileState(StrEnum):
    """The first four are known. The others are refused."""

    ORIGINAL = "vLLM's own"
    PATCHED = "patched"
    DECLARED = "declared by the owner"
    EARLIER = "patched by another series"
    LOST = "patched, original lost"
    EDITED = "edited"
    LINE_ENDS = "lines end with CRLF"
    MISSING = "missing"
    UNREADABLE = "unreadable"

    @property
    def is_known(self) -> bool:
        return self in (FileState.ORIGINAL, FileState.PATCHED, FileState.DECLARED, FileState.EARLIER)

    @property
    def is_applied(self) -> bool:
        """Whether the file has the series."""
        return self in (FileState.PATCHED, FileState.DECLARED)
