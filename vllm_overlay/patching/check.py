# SPDX-License-Identifier: Apache-2.0
"""What every patch would do on a tree of any version: ``--check``, and the first step when the pin moves."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import ConflictError, PatchError
from vllm_overlay.patching.replace import checked_target
from vllm_overlay.patching.series import Patch, Series, load


class PatchOutcome(StrEnum):
    """What a patch would do on a tree of any version."""

    APPLIES = "applies"
    ALREADY_THERE = "already there"
    NO_LONGER_NEEDED = "no longer needed"
    CONFLICTS = "conflicts"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What each patch would do on a tree. ``refusal`` says why ``apply`` would refuse; empty when it would not."""

    root: Path
    vllm_version: str | None
    outcomes: Mapping[str, PatchOutcome]
    reasons: Mapping[str, str]
    refusal: str
    is_applied: bool

    @property
    def would_apply(self) -> bool:
        return not self.refusal


def check(root: Path, series: Series | None = None) -> CheckReport:
    """What every patch would do on this tree, and whether ``apply`` would go ahead. Touches nothing."""
    series = series or load()
    outcomes: dict[str, PatchOutcome] = {}
    reasons: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    conflicting: list[Patch] = []
    for patch in series.patches:
        outcomes[patch.name], reasons[patch.name] = _outcome(patch, root, contents)
        if outcomes[patch.name] is PatchOutcome.CONFLICTS:
            if earlier := [other.name[:4] for other in conflicting if other.paths & patch.paths]:
                reasons[patch.name] += f" (where {', '.join(earlier)} did not apply either)"
            conflicting.append(patch)
    found = tree.status(root, series)
    return CheckReport(root, found.vllm_version, outcomes, reasons, tree.refusal(root, series), found.is_applied)


def _outcome(patch: Patch, root: Path, contents: dict[str, bytes]) -> tuple[PatchOutcome, str]:
    """Tries one patch on ``contents``, which then hold what it leaves; reads the files that are not there yet."""
    try:
        for diff in patch.files:
            if diff.path not in contents:
                contents[diff.path] = checked_target(root, diff.path).read_bytes()
        return _try(patch, root, contents)
    except PatchError as error:
        return PatchOutcome.CONFLICTS, str(error)


def _try(patch: Patch, root: Path, contents: dict[str, bytes]) -> tuple[PatchOutcome, str]:
    try:
        contents.update({diff.path: diff.apply(contents[diff.path]) for diff in patch.files})
        return PatchOutcome.APPLIES, ""
    except ConflictError as error:
        conflict = str(error)
    try:
        for diff in patch.files:
            diff.reversed().apply(contents[diff.path])
        return PatchOutcome.ALREADY_THERE, "its lines are there"
    except ConflictError:
        pass
    if patch.drop_sign:
        path, text = patch.drop_sign
        content = contents[path] if path in contents else checked_target(root, path).read_bytes()
        if text.encode() in content:
            return PatchOutcome.NO_LONGER_NEEDED, f"{path} has `{text}`"
    return PatchOutcome.CONFLICTS, conflict
