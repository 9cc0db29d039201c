# SPDX-License-Identifier: Apache-2.0
"""vLLM's own files, kept in ``.vllm-overlay/`` beside ``vllm/`` while the tree is patched.

A series knows the way back from its own contents only. With the kept originals, a changed series finds the way back
from the contents of the one before.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching.replace import as_refusals, write_atomically
from vllm_overlay.patching.series import FileChain, sha256

STATE_DIRECTORY = ".vllm-overlay"

Notes = dict[str, dict[str, str]]
"""path -> SHA-256 of a content that ``apply`` wrote -> SHA-256 of the original."""


@dataclass(frozen=True, slots=True)
class KeptOriginals:
    """The originals kept for one tree, and the notes that say which content each belongs to."""

    root: Path
    notes: Notes

    @classmethod
    def read(cls, root: Path) -> "KeptOriginals":
        """What is noted for a tree. Empty if the notes are damaged or not there."""
        try:
            noted = json.loads(_notes_file(root).read_text(encoding="utf-8"))
            notes = {str(path): {str(k): str(v) for k, v in digests.items()} for path, digests in noted.items()}
        except (OSError, ValueError, AttributeError):
            notes = {}
        return cls(root, notes)

    def knows(self, path: str, digest: str) -> bool:
        """Whether an earlier ``apply`` wrote this content."""
        return digest in self.notes.get(path, {})

    def find(self, path: str, digest: str) -> bytes | None:
        """The original of a file with this content. None if none was kept, or if it is not what was noted."""
        original = self.notes.get(path, {}).get(digest)
        if original is None:
            return None
        try:
            content = self._file(original).read_bytes()
        except OSError:
            return None
        return content if sha256(content) == original else None

    def keep(self, chains: Mapping[str, FileChain], originals: Mapping[str, bytes]) -> None:
        """Keeps the originals of these chains. ``apply`` calls it before the first rename; raises PatchError."""
        notes = dict(self.notes)
        for path, chain in chains.items():
            notes[path] = {**notes.get(path, {}), chain.patched: chain.original}
        if notes == self.notes and all(self._file(chain.original).is_file() for chain in chains.values()):
            return
        with as_refusals(self.root, "nothing was changed"):
            for path, chain in chains.items():
                write_atomically(self._file(chain.original), originals[path])
            write_atomically(_notes_file(self.root), json.dumps(notes, indent=1).encode())

    def drop(self) -> None:
        """Forgets them all: the tree is vLLM's own again."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _directory(self) -> Path:
        return self.root / STATE_DIRECTORY

    def _file(self, original: str) -> Path:
        return self._directory / "originals" / original


def _notes_file(root: Path) -> Path:
    return root / STATE_DIRECTORY / "originals.json"
