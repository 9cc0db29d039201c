# SPDX-License-Identifier: Apache-2.0
"""What every patch would do on a tree of any version: ``--check``, and the first step when the pin moves."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import ConflictError, PatchError
from vllm_overlay.patching.replace import read_target, unwritable_directory
from vllm_overlay.patching.series import Patch, Series, load
from vllm_overlay.patching.states import FileState, PatchState


class PatchOutcome(StrEnum):
    """What a patch would do on a tree of any version."""

    APPLIES = "applies"
    ALREADY_THERE = "already there"
    REFUSED = "would be refused"
    NO_LONGER_NEEDED = "no longer needed"
    CONFLICTS = "conflicts"


Row = tuple[PatchOutcome, str]
"""What a patch would do, and why."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What each patch would do on a tree.

    ``refusal`` says why ``apply`` would refuse what is in the tree; empty when it would not. ``unwritable`` is a
    directory that this user may not write and ``apply`` has to, if it has anything to do.
    """

    root: Path
    vllm_version: str | None
    outcomes: Mapping[str, PatchOutcome]
    reasons: Mapping[str, str]
    refusal: str
    is_applied: bool
    unwritable: Path | None

    @property
    def would_apply(self) -> bool:
        return not self.refusal


def check(root: Path, series: Series | None = None) -> CheckReport:
    """What every patch would do on this tree, and whether ``apply`` would go ahead. Touches nothing."""
    series = series or load()
    found = tree.status(root, series)
    rows = _try_all(root, series) if found.is_of_another_version else _by_states(found, series)
    outcomes = {name: outcome for name, (outcome, _) in rows.items()}
    reasons = {name: reason for name, (_, reason) in rows.items()}
    unwritable = None if found.is_applied else unwritable_directory(root, series.chains)
    return CheckReport(
        root, found.vllm_version, outcomes, reasons, tree.refusal(root, series), found.is_applied, unwritable
    )


def _by_states(found: tree.Status, series: Series) -> dict[str, Row]:
    """On the version of the series a file is known or not: no patch has to be tried."""
    return {patch.name: _by_state(patch, found) for patch in series.patches}


def _by_state(patch: Patch, found: tree.Status) -> Row:
    states = {path: found.files[path] for path in sorted(patch.paths)}
    if any(state.hinders for state in states.values()):
        said = [f"{path} is {state}" for path, state in states.items() if state.hinders]
        return PatchOutcome.REFUSED, "; ".join(said)
    if found.patches[patch.name] is PatchState.APPLIED:
        return PatchOutcome.ALREADY_THERE, "its lines are there"
    outdated = [path for path, state in states.items() if state is FileState.OUTDATED]
    return PatchOutcome.APPLIES, f"in place of another series' in {', '.join(outdated)}" if outdated else ""


def _try_all(root: Path, series: Series) -> dict[str, Row]:
    """Each patch after those before it, in memory."""
    rows: dict[str, Row] = {}
    contents: dict[str, bytes] = {}
    conflicting: list[Patch] = []
    for patch in series.patches:
        outcome, reason = _outcome(patch, root, contents)
        if outcome is PatchOutcome.CONFLICTS:
            if earlier := [other.name[:4] for other in conflicting if other.paths & patch.paths]:
                reason += f" (where {', '.join(earlier)} did not apply either)"
            conflicting.append(patch)
        rows[patch.name] = outcome, reason
    return rows


def _outcome(patch: Patch, root: Path, contents: dict[str, bytes]) -> Row:
    """Tries one patch on ``contents``, which then hold what it leaves; reads the files that are not there yet."""
    try:
        for diff in patch.files:
            if diff.path not in contents:
                contents[diff.path] = read_target(root, diff.path)
        return _try(patch, root, contents)
    except PatchError as error:
        return PatchOutcome.CONFLICTS, str(error)


def _try(patch: Patch, root: Path, contents: dict[str, bytes]) -> Row:
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
        content = contents[path] if path in contents else read_target(root, path)
        if text.encode() in content:
            return PatchOutcome.NO_LONGER_NEEDED, f"{path} has `{text}`"
    return PatchOutcome.CONFLICTS, conflict
