# SPDX-License-Identifier: Apache-2.0
"""What a touched file is, and what a refusal says of those that are not vLLM's own: all, and how to lose no edit.

``tree`` calls this. No command here may destroy what somebody has written.
"""

import shlex
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from vllm_overlay.versions import VLLM as VLLM_VERSION


class FileState(StrEnum):
    """What a file is by its SHA-256. The first three are known: vLLM's own content can be had. Others are refused."""

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


def of_files(root: Path, foreign: Mapping[str, tuple[FileState, str]], is_probably_other: bool) -> str:
    """The refusal of a tree for these files: what each is, and why it cannot be read where that is so."""
    width = max(len(state) for state, _ in foreign.values())
    rows = [f"  {state.ljust(width)}  {path}{reason and ': ' + reason}" for path, (state, reason) in foreign.items()]
    files = "1 file is" if len(foreign) == 1 else f"{len(foreign)} files are"
    headline = f"{files} not vLLM {VLLM_VERSION}'s own, patched or not, in {root}:"
    paragraphs = ["\n".join([headline, *rows]), "Nothing was changed."]
    if is_probably_other:
        paragraphs[-1] += f" This is probably another version of vLLM: use {VLLM_VERSION}."
    if edited := _in_state(foreign, FileState.EDITED):
        paragraphs.append(_keep(root, edited))
    if converted := _in_state(foreign, FileState.LINE_ENDS):
        paragraphs.append(
            "Something has changed line ends; git does where core.autocrlf is set. This mends it:\n"
            f"    cd {shlex.quote(str(root))} && sed -i 's/\\r$//' {converted}"
        )
    if _in_state(foreign, FileState.MISSING) or _in_state(foreign, FileState.LOST):
        paragraphs.append(
            f"Put vLLM {VLLM_VERSION}'s own file, from its wheel or source distribution, where one is missing or its "
            "original lost."
        )
    return "\n\n".join(paragraphs)


def _in_state(foreign: Mapping[str, tuple[FileState, str]], wanted: FileState) -> str:
    """These files as the arguments of a command."""
    return shlex.join(path for path, (state, _) in foreign.items() if state is wanted)


def _keep(root: Path, edited: str) -> str:
    """How to keep the edits of these files, and have the series."""
    there = shlex.quote(str(root))
    if not (root / ".git").exists():
        return (
            f"The edits are yours to keep. Leave this vLLM as it is and apply the series to another {VLLM_VERSION}:\n"
            "a fresh environment or an unpacked source, with --target DIR. Or copy the edited files aside, put\n"
            "vLLM's own, from its wheel or source distribution, in their place, and run this again:\n"
            f"    tar -C {there} -cf vllm-edits.tar {edited}"
        )
    other = shlex.quote(str(root.parent / f"vllm-{VLLM_VERSION}"))
    return (
        "The edits are yours to keep. Put them into the stash, or commit them and leave this checkout as it is: the\n"
        "series can be applied to another one, with --target.\n"
        f"    git -C {there} stash push -- {edited}\n"
        f"    git -C {there} worktree add {other} v{VLLM_VERSION}"
    )
