# SPDX-License-Identifier: Apache-2.0
"""Reads and applies unified diffs.

Context is exact, without fuzz. A hunk may have moved, but only to one possible place. It works on bytes and on whole
lines with their line ends, so that what is not in a hunk stays as it is.
"""

import re
from dataclasses import dataclass

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_PATH = re.compile(r"^vllm(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+$")
_REFUSED = (
    (b"new file mode", "creates a file"),
    (b"deleted file mode", "deletes a file"),
    (b"old mode", "changes a file mode"),
    (b"new mode", "changes a file mode"),
    (b"rename ", "renames a file"),
    (b"copy ", "copies a file"),
    (b"similarity index", "renames a file"),
    (b"GIT binary patch", "is binary"),
    (b"Binary files", "is binary"),
)


class PatchError(RuntimeError):
    """A patch, a series or a tree that cannot be worked with. The message names the file and what to do."""


class ConflictError(PatchError):
    """The lines that a hunk expects are not there."""


def is_safe_path(path: str) -> bool:
    """Whether ``path`` names a file inside ``vllm/``, with no way out of it."""
    return _PATH.fullmatch(path) is not None


@dataclass(frozen=True, slots=True)
class Hunk:
    """``old`` is replaced by ``new``; both hold the context lines. ``old_start`` is the line of ``old``, from 1."""

    old_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self, offset: int) -> "Hunk":
        return Hunk(self.old_start + offset, self.new, self.old)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The change to one file; ``path`` is relative to the directory that holds ``vllm/``."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> "FileDiff":
        hunks = []
        offset = 0
        for hunk in self.hunks:
            hunks.append(hunk.reversed(offset))
            offset += len(hunk.new) - len(hunk.old)
        return FileDiff(self.path, tuple(hunks))

    def apply(self, content: bytes) -> bytes:
        """The changed content; raises ConflictError."""
        return self.locate(content)[0]

    def locate(self, content: bytes) -> tuple[bytes, tuple[int, ...]]:
        """The changed content, and by how many lines each hunk was away from where the diff says it is."""
        lines = _split(content)
        offset = grown = 0
        floor = 0
        offsets = []
        for number, hunk in enumerate(self.hunks, start=1):
            expected = hunk.old_start - 1 + grown
            at = _find(lines, hunk.old, expected + offset, floor)
            if at is None:
                raise ConflictError(f"{self.path}: hunk {number} (line {hunk.old_start}) does not match")
            offset = at - expected
            offsets.append(offset)
            lines[at : at + len(hunk.old)] = hunk.new
            floor = at + len(hunk.new)
            grown += len(hunk.new) - len(hunk.old)
        return b"".join(lines), tuple(offsets)


def _split(content: bytes) -> list[bytes]:
    """Lines end at ``\\n`` alone, as in a diff; ``splitlines`` would also break at ``\\r``."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _find(lines: list[bytes], old: tuple[bytes, ...], at: int, floor: int) -> int | None:
    """Where ``old`` stands at or after ``floor``: at line ``at`` if it is there, else at its only other place."""

    def stands(position: int) -> bool:
        return tuple(lines[position : position + len(old)]) == old

    if at >= floor and stands(at):
        return at
    places = [position for position in range(floor, len(lines) - len(old) + 1) if stands(position)]
    return places[0] if len(places) == 1 else None


def parse(text: bytes, name: str) -> tuple[str, tuple[FileDiff, ...]]:
    """Splits a patch into its header and its file changes. Raises PatchError with the patch's name and line."""
    lines = _split(text)
    at = _start_of_diff(lines)
    if at == len(lines):
        raise PatchError(f"{name} holds no diff")
    try:
        header = b"".join(lines[:at]).decode("utf-8")
    except UnicodeDecodeError as error:
        raise PatchError(f"{name}: its header is not UTF-8") from error
    files: list[FileDiff] = []
    while at < len(lines):
        line = lines[at]
        for start, what in _REFUSED:
            if line.startswith(start):
                raise PatchError(
                    f"{name} line {at + 1} {what}: a patch of this series only changes lines of existing files, "
                    "new code belongs into vllm_overlay"
                )
        if line.startswith((b"diff --git ", b"index ")) or not line.strip():
            at += 1
        elif line.startswith(b"--- "):
            diff, at = _parse_file(lines, at, name)
            if any(other.path == diff.path for other in files):
                raise PatchError(f"{name} line {at}: {diff.path} comes twice")
            files.append(diff)
        else:
            raise PatchError(
                f"{name} line {at + 1}: not part of a diff: {line[:60]!r} (made by git? use --no-signature)"
            )
    if not files:
        raise PatchError(f"{name} holds no change to a file")
    return header, tuple(files)


def _start_of_diff(lines: list[bytes]) -> int:
    for at, line in enumerate(lines):
        if line.startswith(b"diff --git ") or (
            line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ ")
        ):
            return at
    return len(lines)


def _parse_file(lines: list[bytes], at: int, name: str) -> tuple[FileDiff, int]:
    if at + 1 >= len(lines) or not lines[at + 1].startswith(b"+++ "):
        raise PatchError(f"{name} line {at + 1}: a `---` line without its `+++` line")
    old_path = _path(lines[at], b"--- ", "a/", name, at + 1)
    new_path = _path(lines[at + 1], b"+++ ", "b/", name, at + 2)
    if old_path != new_path:
        raise PatchError(f"{name} line {at + 1}: {old_path} and {new_path} are different files")
    at += 2
    hunks = []
    while at < len(lines) and lines[at].startswith(b"@@"):
        hunk, at = _parse_hunk(lines, at, name)
        hunks.append(hunk)
    if not hunks:
        raise PatchError(f"{name} line {at}: no hunk follows")
    return FileDiff(old_path, tuple(hunks)), at


def _path(line: bytes, marker: bytes, prefix: str, name: str, number: int) -> str:
    path = line.removeprefix(marker).rstrip(b"\n").split(b"\t")[0].decode("utf-8", "replace")
    if path == "/dev/null":
        raise PatchError(
            f"{name} line {number} creates or deletes a file: a patch of this series only changes lines of existing "
            "files, new code belongs into vllm_overlay"
        )
    inner = path.removeprefix(prefix)
    if inner == path or not is_safe_path(inner):
        raise PatchError(f"{name} line {number}: {path!r} is not of the form {prefix}vllm/<file>")
    return inner


def _parse_hunk(lines: list[bytes], at: int, name: str) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if not match:
        raise PatchError(f"{name} line {at + 1}: not a hunk header: {lines[at][:60]!r}")
    first = at + 1
    old_left, new_left = (int(match[n]) if match[n] is not None else 1 for n in (2, 4))
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while (old_left or new_left) and at < len(lines):
        mark, body = lines[at][:1], lines[at][1:]
        if mark == b"\n":  # an editor took the blank of an empty context line
            mark, body = b" ", b"\n"
        if mark not in (b" ", b"-", b"+"):
            break
        if mark != b"+":
            old.append(body)
            old_left -= 1
        if mark != b"-":
            new.append(body)
            new_left -= 1
        at += 1
        if at < len(lines) and lines[at].startswith(b"\\"):
            for side in [old] * (mark != b"+") + [new] * (mark != b"-"):
                side[-1] = side[-1].removesuffix(b"\n")
            at += 1
    if old_left or new_left:
        raise PatchError(f"{name} line {first}: the hunk has fewer or other lines than its header says")
    if not old:
        raise PatchError(f"{name} line {first}: a hunk without a line of context could go anywhere")
    return Hunk(int(match[1]), tuple(old), tuple(new)), at
