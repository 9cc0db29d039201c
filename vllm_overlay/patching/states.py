# SPDX-License-Identifier: Apache-2.0
"""What a touched file of a tree is, by its SHA-256."""

from enum import StrEnum


class FileState(StrEnum):
    """The first three are known: vLLM's own content can be had. The others are refused."""

    ORIGINAL = "vLLM's own"
    PATCHED = "patched"
    EARLIER = "patched by another series"
    LOST = "patched, original lost"
    EDITED = "edited"
    LINE_ENDS = "lines end with CRLF"
    MISSING = "missing"
    UNREADABLE = "unreadable"

    @property
    def is_known(self) -> bool:
        return self in (FileState.ORIGINAL, FileState.PATCHED, FileState.EARLIER)
