# SPDX-License-Identifier: Apache-2.0
"""Files that hold a change of their owner behind ours: noted in ``.vllm-overlay/`` by their SHA-256."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching.originals import STATE_DIRECTORY
from vllm_overlay.patching.replace import as_refusals, write_atomically


@dataclass(frozen=True, slots=True)
class Declarations:
    """``notes``: path -> SHA-256 of the declared content -> that of the patched content which it changes.

    A series that makes another content of the file takes no declaration from before it.
    """

    file: Path
    notes: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, root: Path) -> "Declarations":
        """What is declared for a tree. Empty if the notes are damaged or not there."""
        file = root / STATE_DIRECTORY / "declared.json"
        try:
            noted = json.loads(file.read_text(encoding="utf-8"))
            notes = {str(path): {str(k): str(v) for k, v in digests.items()} for path, digests in noted.items()}
        except (OSError, ValueError, AttributeError):
            notes = {}
        return cls(file, notes)

    def holds(self, path: str, digest: str, patched: str) -> bool:
        """Whether this content of a file is declared behind that patched one."""
        return self.notes.get(path, {}).get(digest) == patched

    def add(self, declared: Mapping[str, tuple[str, str]]) -> None:
        """Notes (content, patched content) of these files, in place of what was declared of them before."""
        notes = {**self.notes, **{path: {digest: patched} for path, (digest, patched) in declared.items()}}
        with as_refusals(self.file.parent.parent, "nothing was declared"):
            write_atomically(self.file, json.dumps(notes, indent=1).encode())
