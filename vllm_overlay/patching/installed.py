# SPDX-License-Identifier: Apache-2.0
"""The vLLM of this process's environment: where it is, and whether it has the series.

Our connectors call ``require`` at start, in every vLLM process.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.series import Series, load
from vllm_overlay.patching.states import PatchState
from vllm_overlay.patching.tree import DISTRIBUTIONS, Status, is_other_version, status

_PACKAGE = Path(__file__).resolve().parents[1]


class UnpatchedError(RuntimeError):
    """The installed vLLM is not what this overlay needs. One sentence, which names the command that mends it."""


@dataclass(frozen=True, slots=True)
class SeriesReport:
    """The installed vLLM against the series.

    ``problem`` is one sentence, empty when all is well. ``is_broken``: no vLLM, another version, a changed file or a
    half-applied series, so that it does not matter which patches are in.
    """

    vllm_version: str | None
    series: str
    root: Path | None
    applied: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""
    is_broken: bool = False

    def __str__(self) -> str:
        """For the log: versions, and which patches are in."""
        total = len(self.applied) + len(self.missing)
        names = ", ".join(self.applied) or "none"
        return f"vLLM {self.vllm_version}, series {self.series}: {len(self.applied)} of {total} patches ({names})"


def installed_root() -> Path | None:
    """Where this environment's vLLM lies, without importing it; None when there is none."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # vllm is imported, but was put together by hand
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent.parent


def verify_installed(series: Series | None = None, root: Path | None = None) -> SeriesReport:
    """Compares the vLLM of this process's environment with the series. Hashes the touched files, imports nothing."""
    series = series or load()
    names = tuple(patch.name for patch in series.patches)
    pin, command = series.vllm_version, apply_command()
    root = root or installed_root()
    if root is None:
        problem = f"vLLM is not installed here: install vLLM {pin}, then run {command}"
        return SeriesReport(None, series.id, None, (), names, problem, is_broken=True)
    found = status(root, series)
    version = found.vllm_version or _distribution_version()
    if is_other_version(version):
        problem = (
            f"vLLM {version} is installed and this overlay is made for {pin}: install vLLM {pin}, then run {command}"
        )
        return SeriesReport(version, series.id, root, (), names, problem, is_broken=True)
    applied = tuple(name for name, state in found.patches.items() if state is PatchState.APPLIED)
    missing = tuple(name for name in names if name not in applied)
    problem = _broken(found, pin, command)
    is_broken = bool(problem)
    if missing and not is_broken:
        problem = f"vLLM in {root / 'vllm'} lacks {', '.join(missing)}: run {command}"
    return SeriesReport(version or pin, series.id, root, applied, missing, problem, is_broken)


def _broken(found: Status, pin: str, command: str) -> str:
    """Why these files are no vLLM at all, patched or not. Empty if they are one."""
    if hindering := [f"{path} ({state})" for path, state in found.files.items() if state.hinders]:
        return (
            f"vLLM in {found.root / 'vllm'} has files that are not those of vLLM {pin}, patched or not: "
            f"{', '.join(hindering)}: run {apply_command('--installed --check')}, which says how to go on and to keep "
            "what was edited"
        )
    if found.is_half_applied:
        return f"the patches were applied to {found.root / 'vllm'} only in part: run {command}, which repairs it"
    return ""


def require(needed: Sequence[str] | None = None) -> SeriesReport:
    """The check at start of every process. Raises UnpatchedError, whose sentence names the command to run.

    ``needed``: names of patches, all of the series by default. A half-applied series or another version is refused
    whatever is needed.
    """
    try:
        report = verify_installed()
    except PatchError as error:
        raise UnpatchedError(str(error)) from error
    lacking = report.missing if needed is None else tuple(name for name in needed if name not in report.applied)
    if lacking or report.is_broken:
        raise UnpatchedError(report.problem or f"{', '.join(lacking)} is not in series {report.series}")
    return report


def _distribution_version() -> str | None:
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def apply_command(where: str = "--installed") -> str:
    """The command that applies the series to a tree: a clone has the tool, a wheel has only the module."""
    clone = _PACKAGE.parent
    if (clone / "tools" / "apply_patches.py").is_file():
        return f"`python tools/apply_patches.py {where}` in {clone}"
    return f"`python -m vllm_overlay.patching {where}`"
