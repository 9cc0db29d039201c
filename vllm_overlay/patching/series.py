# SPDX-License-Identifier: Apache-2.0
"""The series as it lies in patches/: the patches in order, the pin, the checksums of every step."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.patching.diff import FileDiff, PatchError, parse
from vllm_overlay.versions import VLLM as VLLM_VERSION

_PACKAGE = Path(__file__).resolve().parent.parent


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch of the series: its DEP-3 header (field names as written) and its changes."""

    name: str
    header: Mapping[str, str]
    files: tuple[FileDiff, ...]

    @property
    def paths(self) -> set[str]:
        """The files it changes."""
        return {diff.path for diff in self.files}

    @property
    def drop_sign(self) -> tuple[str, str] | None:
        """(file, text) of the header's ``Drop-Sign``: a vLLM whose file holds that text no longer needs the patch.

        None where the header says ``none: <why>``.
        """
        path, _, text = self.header.get("Drop-Sign", "").partition(": ")
        return (path, text) if path.startswith("vllm/") and text else None


@dataclass(frozen=True, slots=True)
class FileChain:
    """The known contents of one file, as SHA-256: the original, then after each patch that touches it."""

    original: str
    after: tuple[tuple[str, str], ...]

    @property
    def patched(self) -> str:
        return self.after[-1][1]

    def position(self, digest: str) -> int | None:
        """How many of the file's patches are in the content with this SHA-256; None if it is none of ours."""
        known = [self.original, *(digest for _, digest in self.after)]
        return known.index(digest) if digest in known else None


@dataclass(frozen=True, slots=True)
class Series:
    """The patches in order, the version they are made for, and the checksums of what they touch."""

    directory: Path
    vllm_version: str
    patches: tuple[Patch, ...]
    chains: Mapping[str, FileChain]
    id: str

    def diffs_of(self, path: str) -> list[FileDiff]:
        return [diff for patch in self.patches for diff in patch.files if diff.path == path]

    def original_of(self, path: str, content: bytes) -> bytes | None:
        """The original of a file that has any of our contents, by taking patches back; None if it has none."""
        position = self.chains[path].position(sha256(content))
        if position is None:
            return None
        for diff in reversed(self.diffs_of(path)[:position]):
            content = diff.reversed().apply(content)
        if sha256(content) != self.chains[path].original:
            raise PatchError(f"{path}: the series and its checksums disagree: reinstall this overlay")
        return content

    def patched_from(self, path: str, content: bytes) -> bytes:
        """The fully patched file, from its original."""
        for diff in self.diffs_of(path):
            content = diff.apply(content)
        if sha256(content) != self.chains[path].patched:
            raise PatchError(f"{path}: the series and its checksums disagree: reinstall this overlay")
        return content


def load(directory: Path | None = None, *, checksums: bool = True) -> Series:
    """Reads a series, by default this installation's. ``checksums=False`` is for the program that writes them."""
    directory = directory or _patches_directory()
    try:
        version = (directory / "vllm_version.txt").read_text(encoding="utf-8").strip()
        listed = (directory / "series").read_text(encoding="utf-8").splitlines()
        names = [line.split("#")[0].strip() for line in listed]
        texts = {name: (directory / name).read_bytes() for name in names if name}
        known = json.loads((directory / "checksums.json").read_text(encoding="utf-8")) if checksums else {}
    except OSError as error:
        raise PatchError(f"{error.filename} cannot be read ({error.strerror}): reinstall this overlay") from error
    except ValueError as error:
        raise PatchError(f"{directory}/checksums.json is damaged: reinstall this overlay") from error
    digest = hashlib.sha256(version.encode())
    patches = []
    for name, text in texts.items():
        header, files = parse(text, name)
        patches.append(Patch(name, _parse_header(header), files))
        digest.update(name.encode() + b"\0" + sha256(text).encode())
    series_id = digest.hexdigest()[:12]
    if version != VLLM_VERSION:
        raise PatchError(f"{directory}/vllm_version.txt says {version}, vllm_overlay.VLLM_VERSION {VLLM_VERSION}")
    if checksums and known.get("series") != series_id:
        raise PatchError(f"{directory}/checksums.json is of another series: run devtools/validate_patches.py --update")
    return Series(directory, version, tuple(patches), _chains(known.get("files", {}), patches), series_id)


def _patches_directory() -> Path:
    """A wheel carries the series inside the package, a clone beside it."""
    packaged = _PACKAGE / "_patches"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "patches"


def _parse_header(text: str) -> dict[str, str]:
    """DEP-3: ``Field: value``; lines that begin with a blank go on, a lone dot is an empty line."""
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith((" ", "\t")) and name:
            fields[name] += "\n" + ("" if line.strip() == "." else line.strip())
        elif match := re.match(r"([A-Za-z][A-Za-z0-9-]*):[ \t]*(.*)", line):
            name = match[1]
            fields[name] = match[2].strip()
        else:
            name = ""
    return fields


def _chains(files: Mapping[str, Any], patches: Sequence[Patch]) -> dict[str, FileChain]:
    chains = {}
    for path, entry in files.items():
        after = tuple((p.name, str(entry["after"][p.name])) for p in patches if any(d.path == path for d in p.files))
        chains[path] = FileChain(str(entry["original"]), after)
    return chains
