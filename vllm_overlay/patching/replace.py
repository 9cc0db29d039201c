# SPDX-License-Identifier: Apache-2.0
"""Replaces several files of a tree by renames: all of them, or none when an exception ends it.

No file is written in place, so hard links of it (pip's cache, another environment) keep their bytes. All new contents
are staged beside their targets first; then each is renamed into place. An exception puts the old contents back.

A killed run leaves every file whole, old or new, and some staged files. ``tree`` knows each content by its SHA-256, so
the next run brings all files to one state. It calls ``remove_staged`` first.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vllm_overlay.patching.diff import PatchError

_PATH = re.compile(r"vllm(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+")


class MissingFileError(PatchError):
    """A file that every vLLM of the series has is not there."""


def read_target(root: Path, path: str) -> bytes:
    """The content of the file ``path`` below ``root``.

    Raises MissingFileError, or PatchError if it is no regular file of ``vllm/``, if a symbolic link leads there, or if
    this user may not read it.
    """
    if not _PATH.fullmatch(path):
        raise PatchError(f"{path!r} is not a file of vllm/")
    target = root
    try:
        for part in path.split("/"):
            target = target / part
            if stat.S_ISLNK(target.lstat().st_mode):
                raise PatchError(
                    f"{target} is a symbolic link: install vLLM with copies (uv --link-mode=copy), or name the real "
                    "directory with --target"
                )
        if not target.is_file():
            raise PatchError(f"{target} is not a file")
        return target.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{target} is missing: this is not a complete vLLM") from None
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

    Raises PatchError for what the system refuses, and lets other exceptions through. The old contents are back in place
    then, unless the message says that one could not be put back.
    """
    old = {path: read_target(root, path) for path in contents}
    changed = {path: content for path, content in contents.items() if old[path] != content}
    with as_refusals(root, "the tree is as it was"):
        started: list[str] = []
        try:
            for path, content in changed.items():
                _stage(root / path, content)
            for path in changed:
                started.append(path)
                _put_in_place(root / path)
            for directory in {(root / path).parent for path in changed}:
                _sync_directory(directory)
        except BaseException:
            try:
                remove_staged(root, changed)
            finally:
                _put_back(root, {path: old[path] for path in started})
            raise


def remove_staged(root: Path, paths: Iterable[str]) -> None:
    """Removes what a killed run left beside these files, which ``read_target`` took. Needs the lock."""
    with as_refusals(root, "mend that and run this again"):
        for path in paths:
            staged = _staged(root / path)
            if os.path.lexists(staged):  # a read-only file system refuses to unlink even what is not there
                os.unlink(staged)


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
        if error.errno == errno.EROFS:
            hint = f"mount it for writing, or apply the series to a copy of {root} with --target"
        elif error.errno in (errno.EACCES, errno.EPERM):
            hint = f"run this as the owner of {root}"
        raise PatchError(f"{error.filename or root}: {error.strerror}; {hint}") from error


def _staged(target: Path) -> Path:
    return target.with_name(f".{target.name}.vllm-overlay-new")


def _stage(target: Path, content: bytes) -> None:
    """Writes the new file beside its target, with its owner and mode."""
    status = target.stat()
    descriptor = os.open(_staged(target), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if (status.st_uid, status.st_gid) != (os.getuid(), os.getgid()):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
        os.fsync(descriptor)


def _put_in_place(target: Path) -> None:
    """Python matches bytecode by time and size, so what was compiled from the other content goes."""
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
    os.replace(_staged(target), target)


def _put_back(root: Path, old: Mapping[str, bytes]) -> None:
    for path, content in old.items():
        target = root / path
        try:
            if target.read_bytes() != content:
                _stage(target, content)
                _put_in_place(target)
        except OSError as error:
            raise PatchError(
                f"{target} could not be put back ({error.strerror}), so vLLM is patched only in part: mend that and "
                "run this again"
            ) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
