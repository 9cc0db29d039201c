# SPDX-License-Identifier: Apache-2.0
"""What a refusal says of files that are not vLLM's own. It names all, and how to go on and lose no edit.

``tree`` calls this. No command here may destroy what somebody has written.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_overlay.patching.states import FileState
from vllm_overlay.versions import VLLM as VLLM_VERSION

BRANCH = "my-edits"
ARCHIVE = "vllm-edits.tar"


def of_files(root: Path, hindering: Mapping[str, FileState], reasons: Mapping[str, str], total: int) -> str:
    """The refusal of a tree with ``hindering`` files, of ``total`` that the series touches.

    ``reasons``: why a file cannot be read, where that is so.
    """
    states = set(hindering.values())
    paragraphs = [_headline(root, hindering, total) + "\n" + _listed(hindering, reasons), "Nothing was changed."]
    if FileState.OTHER_VERSION in states:
        paragraphs[-1] += f" Use vLLM {VLLM_VERSION}, or move the series as docs/moving-the-pin.md says."
        if _is_checkout(root):
            paragraphs.append(f"The series can be applied to a checkout beside this one:\n{_worktree(root)}")
    if edited := [path for path, state in hindering.items() if state is FileState.EDITED]:
        paragraphs.append(_keep(root, edited))
    if {FileState.MISSING, FileState.LOST} & states:
        paragraphs.append(
            f"Put vLLM {VLLM_VERSION}'s own file, from its wheel or source distribution, where one is missing or its "
            "original lost."
        )
    return "\n\n".join(paragraphs)


def _headline(root: Path, hindering: Mapping[str, FileState], total: int) -> str:
    if FileState.OTHER_VERSION in hindering.values():
        return (
            f"{len(hindering)} of the {total} files that the series touches in {root} are not vLLM {VLLM_VERSION}'s: "
            "it does not say its version, and this is probably another version"
        )
    files = "1 file" if len(hindering) == 1 else f"{len(hindering)} files"
    return f"{files} of {root} {'is' if len(hindering) == 1 else 'are'} not vLLM {VLLM_VERSION}'s own, patched or not:"


def _listed(hindering: Mapping[str, FileState], reasons: Mapping[str, str]) -> str:
    width = max(len(state) for state in hindering.values())
    return "\n".join(
        f"  {state.ljust(width)}  {path}{': ' + reasons[path] if path in reasons else ''}"
        for path, state in hindering.items()
    )


def _keep(root: Path, edited: Sequence[str]) -> str:
    """How to keep the edits of these files, and have the series."""
    files = shlex.join(edited)
    if not _is_checkout(root):
        return (
            f"The edits are yours to keep. Leave this vLLM as it is and apply the series to another {VLLM_VERSION}:\n"
            "a fresh environment or an unpacked source, with --target DIR. Or copy the edited files aside, put\n"
            "vLLM's own, from its wheel or source distribution, in their place, and run this again:\n"
            f"    tar -C {shlex.quote(str(root))} -cf {ARCHIVE} {files}"
        )
    git = f"git -C {shlex.quote(str(root))}"
    return (
        "The edits are yours to keep. Put them into the stash, or into a branch, and run this again:\n"
        f"    {git} stash push -- {files}\n"
        f"    {git} switch -c {BRANCH} && {git} commit -m '{BRANCH}' -- {files} && {git} switch --detach HEAD~1\n"
        f"Or leave this checkout as it is and apply the series to another one:\n{_worktree(root)}"
    )


def _worktree(root: Path) -> str:
    other = shlex.quote(str(root.parent / f"vllm-{VLLM_VERSION}"))
    git = f"git -C {shlex.quote(str(root))}"
    return f"    {git} worktree add {other} v{VLLM_VERSION}\nthen with --target {other}"


def _is_checkout(root: Path) -> bool:
    return (root / ".git").exists()
