# SPDX-License-Identifier: Apache-2.0
"""The series as it lies in patches/: the patches in order, and what each touched file is before and after them."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vllm_overlay.patching.diff import FileDiff, PatchError, parse

_PACKAGE = Path(__file__).resolve().parent.parent


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class Sums:
    """The SHA-256 of one touched file: vLLM's own, and with the whole series."""

    original: str
    patched: str


@dataclass(frozen=True)
class Series:
    """The names of the patches in order, the touched files, and an id that changes with what they become."""

    directory: Path
    patches: tuple[str, ...]
    files: Mapping[str, Sums]
    id: str

    @cached_property
    def diffs(self) -> list[FileDiff]:
        """All changes in order; a file comes once for each patch that touches it."""
        return [diff for name in self.patches for diff in parse(read_patch(self.directory / name), name)]

    def patched(self, path: str, original: bytes) -> bytes:
        """The file with the whole series, proven by its SHA-256."""
        content = original
        for diff in self.diffs:
            if diff.path == path:
                content = diff.apply(content)
        if sha256(content) != self.files[path].patched:
            raise PatchError(f"{path}: the series and its checksums disagree: reinstall this overlay")
        return content

    def lacks(self, path: str, original: bytes, content: bytes) -> list[bytes]:
        """The lines that the series adds to a file and that ``content`` does not have."""
        patched, known = self.patched(path, original).splitlines(), {*original.splitlines(), *content.splitlines()}
        return [line for line in patched if line not in known]


def load(directory: Path | None = None) -> Series:
    """A series, by default this installation's. A patch is read when it is applied."""
    directory = directory or _patches_directory()
    try:
        listed = (directory / "series").read_text(encoding="utf-8").splitlines()
        text = (directory / "checksums.json").read_text(encoding="utf-8")
        files = {str(path): Sums(**sums) for path, sums in json.loads(text)["files"].items()}
    except OSError as error:
        raise PatchError(f"{error.filename} cannot be read ({error.strerror}): reinstall this overlay") from error
    except (ValueError, TypeError, KeyError) as error:
        raise PatchError(f"{directory}/checksums.json is damaged: reinstall this overlay") from error
    names = tuple(name for line in listed if (name := line.split("#")[0].strip()))
    return Series(directory, names, files, sha256(text.encode())[:12])


def read_patch(path: Path) -> bytes:
    """The bytes of a patch. Raises PatchError where they cannot be read, or where something has changed line ends."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path} cannot be read ({error.strerror}): reinstall this overlay") from error
    if text.partition(b"\n")[0].endswith(b"\r"):
        raise PatchError(
            f"the lines of {path} end with CRLF, not LF: git changes them where core.autocrlf is set. This mends it:\n"
            f"    sed -i 's/\\r$//' {shlex.quote(str(path.parent))}/*.patch"
        )
    return text


def _patches_directory() -> Path:
    """A wheel carries the series inside the package, a clone beside it."""
    packaged = _PACKAGE / "_patches"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "patches"
