# SPDX-License-Identifier: Apache-2.0
"""Reads a patch of the series and applies it, each hunk at its exact line.

It knows what git writes for changed lines of existing files, and no more; tests hold our patches to that. What comes
out is compared with its SHA-256 (``series``), so a wrong reading can do no harm.
"""

import re
from dataclasses import dataclass, field
from io import BytesIO

_HUNK = re.compile(rb"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class PatchError(RuntimeError):
    """A patch, a series or a tree that cannot be worked with. The message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """``old`` is replaced by ``new``; both hold the context lines. ``start`` is the line of ``old``, from 1."""

    start: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The change to one file; ``path`` is relative to the directory that holds ``vllm/``."""

    path: str
    hunks: list[Hunk] = field(default_factory=list)

    def apply(self, content: bytes) -> bytes:
        """The changed content. Raises PatchError where a hunk's lines are not at their place."""
        lines, changed, at = BytesIO(content).readlines(), list[bytes](), 0
        for hunk in self.hunks:
            start = hunk.start - 1
            end = start + len(hunk.old)
            if lines[start:end] != hunk.old:
                raise PatchError(f"{self.path}: the hunk of line {hunk.start} does not match")
            changed += lines[at:start] + hunk.new
            at = end
        return b"".join(changed + lines[at:])


def parse(text: bytes, name: str) -> list[FileDiff]:
    """The changes of a patch; the header before them is passed over. Raises PatchError with the patch's name."""
    files: list[FileDiff] = []
    hunk = None
    for number, line in enumerate(BytesIO(text).readlines(), start=1):
        mark, body = line[:1], line[1:]
        if line.startswith(b"diff --git "):
            hunk = None
        elif hunk is None and line.startswith(b"+++ b/"):
            files.append(FileDiff(line[6:].decode().strip()))
        elif files and (match := _HUNK.match(line)):
            hunk = Hunk(int(match[1]))
            files[-1].hunks.append(hunk)
        elif hunk is not None:
            if mark not in (b" ", b"-", b"+"):
                raise PatchError(f"{name} line {number}: not part of a diff: {line[:60]!r}")
            if mark != b"+":
                hunk.old.append(body)
            if mark != b"-":
                hunk.new.append(body)
    return files
