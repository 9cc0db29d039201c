# SPDX-License-Identifier: Apache-2.0
"""Replaces several files of a tree by renames: all of them, or none when an exception ends it.

No file is written in place, so hard links of it (pip's cache, another environment) keep their bytes. New contents are
staged beside their targets, and each old file gets a second name there. Then each target is renamed into place. An
exception puts the renamed files back, which needs no space.

A killed run leaves every file whole, old or new, and some staged files. ``tree`` knows each content by its SHA-256, so
the next run brings all files to one state. It calls ``remove_leftovers`` first.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vllm_overlay.patching.diff import PatchError, is_safe_path

_JOURNAL_OF_0_1 = ".vllm-overlay/journal.json"
"""Version 0.1 wrote it. Its interrupted runs are repaired from the contents, as ours are; the journal is not read."""

_NOT_OURS = (errno.EACCES, errno.EPERM)


class MissingFileError(PatchError):
    """A file that every vLLM of the series has is not there."""


def checked_target(root: Path, path: str) -> Path:
    """The file ``path`` below ``root``.

    Raises MissingFileError, or PatchError if it is no regular file, if a symbolic link leads there, or if this user
    may not look.
    """
    if not is_safe_path(path):
        raise PatchError(f"{path!r} is not a file of vllm/")
    target = root
    for part in path.split("/"):
        target = target / part
        try:
            mode = target.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(f"{target} is missing: this is not a complete vLLM") from None
        except OSError as error:
            raise PatchError(f"{target} cannot be read ({error.strerror})") from error
        if stat.S_ISLNK(mode):
            raise PatchError(f"{target} is a symbolic link: name the real directory with --target")
    if not stat.S_ISREG(mode):
        raise PatchError(f"{target} is not a file")
    return target


def read_target(root: Path, path: str) -> bytes:
    """The content of a file that ``checked_target`` takes. Raises as that, and PatchError if it cannot be read."""
    target = checked_target(root, path)
    try:
        return target.read_bytes()
    except OSError as error:
        raise PatchError(f"{target} cannot be read ({error.strerror})") from error


def unwritable_directory(root: Path, paths: Iterable[str]) -> Path | None:
    """The first directory that this user would have to write to replace these files, and may not. Touches nothing."""
    directories = dict.fromkeys([root, *((root / path).parent for path in paths)])
    return next((directory for directory in directories if not os.access(directory, os.W_OK | os.X_OK)), None)


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """Lets one writer into a tree at a time, and waits for another. Does without where a file system has no locks."""
    descriptor = os.open(root / "vllm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_files(root: Path, contents: Mapping[str, bytes]) -> None:
    """Gives every file of ``contents`` its new bytes. Needs the lock.

    Raises PatchError for what the system refuses, and lets other exceptions through. The old files are back in place
    then, unless the message says that one could not be put back.
    """
    targets = {checked_target(root, path): content for path, content in contents.items()}
    changed = {target: content for target, content in targets.items() if target.read_bytes() != content}
    with as_refusals(root, "the tree is as it was"):
        started: list[Path] = []
        try:
            for target, content in changed.items():
                _stage(target, content)
            for target in changed:
                started.append(target)
                _remove_bytecode(target)
                os.replace(_new_name(target), target)
            for directory in {target.parent for target in changed}:
                _sync_directory(directory)
        except BaseException:
            _put_back(started)
            _remove_staged(changed)
            raise
    with as_refusals(root, "the next run removes it"):
        _remove_staged(changed)


def remove_leftovers(root: Path, paths: Iterable[str]) -> None:
    """Removes what a killed run left beside these files. Needs the lock, and paths that ``checked_target`` took."""
    with as_refusals(root, "mend that and run this again"):
        # The journal first: with it and without the staged files, version 0.1 asks for a new vLLM.
        _remove(root / _JOURNAL_OF_0_1)
        _remove_staged(root / path for path in paths)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes one file that lies outside ``vllm/``, by a rename. Makes its directory; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    _sync_directory(path.parent)


@contextlib.contextmanager
def as_refusals(root: Path, hint: str) -> Iterator[None]:
    """Turns what the system refuses into PatchError; ``hint`` unless another user could do it."""
    try:
        yield
    except OSError as error:
        raise PatchError(f"{error.filename or root}: {error.strerror}; {_way_out(root, error, hint)}") from error


def _way_out(root: Path, error: OSError, hint: str) -> str:
    if error.errno == errno.EROFS:
        return f"mount it for writing, or apply the series to a copy of {root} with --target"
    return f"run this as the owner of {root}" if error.errno in _NOT_OURS else hint


def _new_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.vllm-overlay-new")


def _old_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.vllm-overlay-old")


def _stage(target: Path, content: bytes) -> None:
    """Writes the new file beside its target, with its owner and mode, and gives the old one a second name."""
    _remove_staged([target])
    status = target.stat()
    descriptor = os.open(_new_name(target), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if (status.st_uid, status.st_gid) != (os.getuid(), os.getgid()):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
        os.fsync(descriptor)
    try:
        os.link(target, _old_name(target))
    except OSError:  # a file system without hard links
        shutil.copy2(target, _old_name(target))


def _put_back(targets: Iterable[Path]) -> None:
    """Renames the old files over what has replaced them. A staged file that is still there has replaced none."""
    for target in targets:
        if os.path.lexists(_new_name(target)):
            continue
        try:
            _remove_bytecode(target)
            os.replace(_old_name(target), target)
        except OSError as error:
            raise PatchError(
                f"{target} could not be put back ({error.strerror}), so vLLM is patched only in part: mend that and "
                "run this again"
            ) from error


def _remove_staged(targets: Iterable[Path]) -> None:
    for target in targets:
        _remove(_new_name(target))
        _remove(_old_name(target))


def _remove(path: Path) -> None:
    """Looks first: a read-only file system refuses to unlink even what is not there."""
    if os.path.lexists(path):
        os.unlink(path)


def _remove_bytecode(target: Path) -> None:
    """Bytecode is matched by time and size, or not at all: take away what was compiled from the other content."""
    compiled = re.compile(re.escape(target.stem) + r"\.[A-Za-z0-9_-]+(\.opt-\w+)?\.pyc")
    with contextlib.suppress(OSError):
        for entry in os.scandir(target.parent / "__pycache__"):
            if compiled.fullmatch(entry.name):
                os.unlink(entry.path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
