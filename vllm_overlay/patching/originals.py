# SPDX-License-Identifier: Apache-2.0
"""vLLM's own files, kept in ``.vllm-overlay/`` beside ``vllm/`` while the tree is patched: the way back."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching.replace import as_refusals, write_atomically
from vllm_overlay.patching.series import Sums, sha256

STATE_DIRECTORY = ".vllm-overlay"


@dataclass(frozen=True, slots=True)
class KeptOriginals:
    """The originals kept for one tree, each in a file that its SHA-256 names.

    ``notes``: path -> SHA-256 of a content that ``apply`` wrote, of this series or another -> that of the original.
    """

    directory: Path
    notes: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, root: Path) -> "KeptOriginals":
        """What is noted for a tree. Empty if the notes are damaged or not there."""
        directory = root / STATE_DIRECTORY
        try:
            noted = json.loads((directory / "originals.json").read_text(encoding="utf-8"))
            notes = {str(path): {str(k): str(v) for k, v in digests.items()} for path, digests in noted.items()}
        except (OSError, ValueError, AttributeError):
            notes = {}
        return cls(directory, notes)

    def find(self, path: str, digest: str) -> bytes | None:
        """The original of a file that has this content. None if none was kept, or if it is not what was noted."""
        return self.original(self.notes.get(path, {}).get(digest, ""))

    def original(self, digest: str) -> bytes | None:
        """The original with this SHA-256. None if it is not kept, or is damaged."""
        try:
            content = self.file(digest).read_bytes()
        except OSError:
            return None
        return content if sha256(content) == digest else None

    def file(self, digest: str) -> Path:
        """Where the original with this SHA-256 is kept."""
        return self.directory / "originals" / digest

    def keep(self, files: Mapping[str, Sums], originals: Mapping[str, bytes]) -> None:
        """Keeps these originals, all of ``files``. ``apply`` calls it before the first rename; raises PatchError."""
        notes = {path: dict(digests) for path, digests in self.notes.items()}
        with as_refusals(self.directory.parent, "nothing was changed"):
            for path, original in originals.items():
                notes.setdefault(path, {})[files[path].patched] = files[path].original
                if self.original(files[path].original) is None:
                    write_atomically(self.file(files[path].original), original)
            if notes != self.notes:
                write_atomically(self.directory / "originals.json", json.dumps(notes, indent=1).encode())

    def drop(self) -> None:
        """Forgets them all: the tree is vLLM's own again."""
        shutil.rmtree(self.directory, ignore_errors=True)
