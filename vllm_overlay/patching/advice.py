# SPDX-License-Identifier: Apache-2.0
"""What a touched file is, and what a refusal says of those that are not vLLM's own: all, and how to lose no edit.

``tree`` calls this. No command here may destroy what somebody has written.
"""

import shlex
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path

from vllm_overlay.versions import VLLM as VLLM_VERSION

_TOOL = Path(__file__).resolve().parents[2] / "tools" / "apply_patches.py"


class FileState(StrEnum):
    """What a file is by its SHA-256. The first four are known. The others are refused."""

    ORIGINAL = "vLLM's own"
    PATCHED = "patched"
    DECLARED = "declared by the owner"
    EARLIER = "patched by another series"
    LOST = "patched, original lost"
    EDITED = "edited"
    LINE_ENDS = "lines end with CRLF"
    MISSING = "missing"
    UNREADABLE = "unreadable"

    @property
    def is_known(self) -> bool:
        return self in (FileState.ORIGINAL, FileState.PATCHED, FileState.DECLARED, FileState.EARLIER)

    @property
    def is_applied(self) -> bool:
        """Whether the file has the series."""
        return self in (FileState.PATCHED, FileState.DECLARED)


def command(arguments: str) -> str:
    """The command of the series, for any directory: a clone has the tool, a wheel has only the module."""
    program = shlex.quote(str(_TOOL)) if _TOOL.is_file() else "-m vllm_overlay.patching"
    return f"python {program} {arguments}"


def of_files(
    root: Path,
    foreign: Mapping[str, tuple[FileState, str]],
    is_probably_other: bool,
    behind: Collection[str] = (),
    kept: Mapping[str, Path] | None = None,
) -> str:
    """The refusal of a tree for these files: what each is, and why it cannot be read where that is so.

    ``behind``: edited files that have the series. ``kept``: where originals of edited files are kept.
    """
    width = max(len(state) for state, _ in foreign.values())
    rows = [f"  {state.ljust(width)}  {path}{reason and ': ' + reason}" for path, (state, reason) in foreign.items()]
    files = "1 file is" if len(foreign) == 1 else f"{len(foreign)} files are"
    headline = f"{files} not vLLM {VLLM_VERSION}'s own, patched or not, in {root}:"
    paragraphs = ["\n".join([headline, *rows]), "Nothing was changed."]
    if is_probably_other:
        paragraphs[-1] += f" This is probably another version of vLLM: use {VLLM_VERSION}."
    edited = _in_state(foreign, FileState.EDITED)
    if behind:
        paragraphs.append(
            "The series is in what was edited. If the change is yours and is to stay, declare it:\n"
            f"    {_at(root, '--declare ' + shlex.join(behind))}\n"
            "If it is not to stay, keep it in an archive, put vLLM's own in its place, and apply the series again:\n"
            f"{_aside(root, list(behind), kept or {})}"
        )
    if other := [path for path in edited if path not in behind]:
        paragraphs.append(_keep(root, other, kept or {}))
    if converted := _in_state(foreign, FileState.LINE_ENDS):
        paragraphs.append(
            "Something has changed line ends; git does where core.autocrlf is set. This mends it:\n"
            f"    cd {shlex.quote(str(root))} && sed -i 's/\\r$//' {shlex.join(converted)}"
        )
    if _in_state(foreign, FileState.MISSING) or _in_state(foreign, FileState.LOST):
        paragraphs.append(
            f"Put vLLM {VLLM_VERSION}'s own file, from its wheel or source distribution, where one is missing or its "
            "original lost."
        )
    return "\n\n".join(paragraphs)


def of_declared(root: Path, declared: Collection[str], kept: Mapping[str, Path]) -> str:
    """The refusal to take the series out from under changes that were declared."""
    files = "1 file holds a change that was" if len(declared) == 1 else f"{len(declared)} files hold changes that were"
    return (
        f"{files} declared by the owner, and would lose it: {', '.join(declared)}. Nothing was changed.\n\n"
        "Take your change out first, with `patch -R` say. Or keep the files in an archive, put vLLM's own in their\n"
        f"place, and run this again:\n{_aside(root, list(declared), kept)}"
    )


def _in_state(foreign: Mapping[str, tuple[FileState, str]], wanted: FileState) -> list[str]:
    return [path for path, (state, _) in foreign.items() if state is wanted]


def _at(root: Path, arguments: str) -> str:
    return command(f"--target {shlex.quote(str(root))} {arguments}".strip())


def _aside(root: Path, paths: list[str], kept: Mapping[str, Path]) -> str:
    """Keeps files in an archive, then puts vLLM's own in their place where they are known."""
    copies = [shlex.join(["cp", str(kept[path]), str(root / path)]) for path in paths if path in kept]
    return "    " + " && ".join([shlex.join(["tar", "-C", str(root), "-cf", "vllm-edits.tar", *paths]), *copies])


def _keep(root: Path, edited: list[str], kept: Mapping[str, Path]) -> str:
    """How to keep the edits of files that lack the series, and how to have both."""
    there, files = shlex.quote(str(root)), shlex.join(edited)
    if not (root / ".git").exists():
        return (
            f"The edits are yours to keep. Leave this vLLM as it is and apply the series to another {VLLM_VERSION}:\n"
            "a fresh environment or an unpacked source, with --target DIR. Or copy the edited files aside, put\n"
            "vLLM's own, from its wheel or source distribution, in their place, and run this again:\n"
            f"{_aside(root, edited, kept)}\n"
            "To have both, then make your change in what the series has written, and declare it:\n"
            f"    {_at(root, '--declare ' + files)}"
        )
    other = shlex.quote(str(root.parent / f"vllm-{VLLM_VERSION}"))
    return (
        "The edits are yours to keep. Put them into the stash, or commit them and leave this checkout as it is: the\n"
        "series can be applied to another one, with --target.\n"
        f"    git -C {there} stash push -- {files}\n"
        f"    git -C {there} worktree add {other} v{VLLM_VERSION}\n"
        "To have both, apply the series where the edits are in the stash, then your change, and declare it:\n"
        f"    {_at(root, '')}\n"
        f"    git -C {there} diff stash@{{0}}^ stash@{{0}} -- {files} | git -C {there} apply\n"
        f"    {_at(root, '--declare ' + files)}"
    )
