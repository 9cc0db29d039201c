# SPDX-License-Identifier: Apache-2.0
"""What is kept of a patched tree in ``.vllm-overlay/`` beside ``vllm/``: vLLM's own files, the way back.

And notes of the files that hold a change of their owner behind ours.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching.replace import as_refusals, write_atomically
from vllm_overlay.patching.series import Sums, sha256

STATE_DIRECTORY = ".vllm-overlay"
Notes = Mapping[str, Mapping[str, str]]
"""Path -> SHA-256 of a content of that file -> SHA-256 of the content that it was made from."""
_WRITTEN, _DECLARED = "originals.json", "declared.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one tree. Originals lie in files that their SHA-256 names.

    ``written``: from what ``apply`` wrote, of this series or another, to the original. ``declared``: from what an owner
    declared to the patched content which it changes. A series that makes another content of the file takes no
    declaration from before it.
    """

    directory: Path
    written: Notes
    declared: Notes

    @classmethod
    def read(cls, root: Path) -> "Kept":
        """What is noted for a tree. Notes that are damaged or not there are empty."""
        directory = root / STATE_DIRECTORY
        return cls(directory, _notes(directory / _WRITTEN), _notes(directory / _DECLARED))

    def find(self, path: str, digest: str) -> bytes | None:
        """The original of a file that has this content. None if none was kept, or if it is not what was noted."""
        return self.original(self.written.get(path, {}).get(digest, ""))

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
        notes = {path: dict(digests) for path, digests in self.written.items()}
        with as_refusals(self.directory.parent, "nothing was changed"):
            for path, original in originals.items():
                notes.setdefault(path, {})[files[path].patched] = files[path].original
                if self.original(files[path].original) is None:
                    write_atomically(self.file(files[path].original), original)
            if notes != self.written:
                self._write(_WRITTEN, notes)

    def declare(self, declared: Notes) -> None:
        """Notes these declarations in place of those of the same files; raises PatchError."""
        with as_refusals(self.directory.parent, "nothing was declared"):
            self._write(_DECLARED, {**self.declared, **declared})

    def drop(self) -> None:
        """Forgets all of it: the tree is vLLM's own again."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write(self, name: str, notes: Notes) -> None:
        write_atomically(self.directory / name, json.dumps(notes, indent=1).encode())


def _notes(file: Path) -> Notes:
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
        return {str(path): {str(k): str(v) for k, v in digests.items()} for path, digests in noted.items()}
    except (OSError, ValueError, AttributeError):
        return {}
