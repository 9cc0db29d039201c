# SPDX-License-Identifier: Apache-2.0
"""Replaces several files of a tree, all or none, also when the process is killed in between.

A journal says what is going on before anything is touched. New contents are staged beside their targets, the old
files stay reachable under a second name, then every target is renamed into place; never written to, so that hard
links of it (pip's cache, another environment) keep their bytes. Whoever comes next finds the journal of a run that
did not end and rolls it back to the very files that were there before.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.patching.diff import PatchError, is_safe_path

STATE_DIRECTORY = ".vllm-overlay"
_STAGED, _ENDED = "staged", "ended"
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file of a journal: its SHA-256 before and after."""

    path: str
    before: str
    after: str


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def checked_target(root: Path, path: str) -> Path:
    """The file ``path`` below ``root``; PatchError unless it is a regular file reached without symbolic links."""
    if not is_safe_path(path):
        raise PatchError(f"{path!r} is not a file of vllm/")
    target = root
    for part in path.split("/"):
        target = target / part
        try:
            mode = target.lstat().st_mode
        except FileNotFoundError:
            raise PatchError(f"{target} is missing: this is not a complete vLLM") from None
        if stat.S_ISLNK(mode):
            raise PatchError(f"{target} is a symbolic link: name the real directory with --target")
    if not stat.S_ISREG(mode):
        raise PatchError(f"{target} is not a file")
    return target


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """One writer a tree at a time; waits for another one. File systems without locks are used without."""
    descriptor = os.open(root / "vllm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_interrupted(root: Path) -> bool:
    """Whether a run on this tree did not end."""
    return _journal_path(root).exists()


def recover(root: Path) -> bool:
    """Rolls back what an interrupted run left; True when there was one. Needs the lock."""
    journal = _journal_path(root)
    try:
        text = journal.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    try:
        content = json.loads(text)
        phase = str(content["phase"])
        entries = [_Entry(str(e["path"]), str(e["before"]), str(e["after"])) for e in content["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{journal} is damaged: reinstall vLLM, then remove that file") from error
    for entry in entries:
        if not is_safe_path(entry.path):
            raise PatchError(f"{journal} names {entry.path!r}: reinstall vLLM, then remove that file")
    try:
        if phase == _STAGED:
            for entry in entries:
                _roll_back(root, entry)
        _clean(root, entries)
        journal.unlink()
    except OSError as error:
        raise PatchError(f"{error.filename or root}: {error.strerror}; mend that and run this again") from error
    return True


def replace_files(root: Path, contents: Mapping[str, bytes]) -> None:
    """Gives every file of ``contents`` its new bytes, or none of them. Needs the lock; rolls back when it raises."""
    entries = []
    for path, content in contents.items():
        before = sha256(checked_target(root, path).read_bytes())
        if before != sha256(content):
            entries.append(_Entry(path, before, sha256(content)))
    if not entries:
        return
    try:
        _write_journal(root, _STAGED, entries)
        for entry in entries:
            _stage(root, entry.path, contents[entry.path])
        for entry in entries:
            target = root / entry.path
            _remove_bytecode(target)
            os.replace(_new_name(target), target)
        for directory in {(root / entry.path).parent for entry in entries}:
            _sync_directory(directory)
        _write_journal(root, _ENDED, entries)
    except BaseException as error:
        recover(root)
        if not isinstance(error, OSError):
            raise
        hint = f": run this as the owner of {root}" if error.errno in _NOT_OURS else "; the tree is as it was"
        raise PatchError(f"{error.filename or root}: {error.strerror}{hint}") from error
    recover(root)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file of the state directory anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    _sync_directory(path.parent)


def _journal_path(root: Path) -> Path:
    return root / STATE_DIRECTORY / "journal.json"


def _write_journal(root: Path, phase: str, entries: list[_Entry]) -> None:
    files = [{"path": e.path, "before": e.before, "after": e.after} for e in entries]
    write_atomically(_journal_path(root), json.dumps({"phase": phase, "files": files}, indent=1).encode())


def _new_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.vllm-overlay-new")


def _old_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.vllm-overlay-old")


def _stage(root: Path, path: str, content: bytes) -> None:
    target = checked_target(root, path)
    fresh, old = _new_name(target), _old_name(target)
    fresh.unlink(missing_ok=True)
    old.unlink(missing_ok=True)
    status = target.stat()
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if (status.st_uid, status.st_gid) != (os.getuid(), os.getgid()):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
        os.fsync(descriptor)
    try:
        os.link(target, old)
    except OSError:  # a file system without hard links
        shutil.copy2(target, old)


def _roll_back(root: Path, entry: _Entry) -> None:
    """Puts the old file back if the target is the new one; a file that somebody else wrote since is left alone."""
    target = root / entry.path
    old = _old_name(target)
    try:
        current = sha256(target.read_bytes())
    except FileNotFoundError:
        current = entry.after
    if current != entry.after:
        return
    if not old.exists():
        raise PatchError(f"{target} cannot be rolled back, {old.name} is gone: reinstall vLLM and run this again")
    _remove_bytecode(target)
    os.replace(old, target)


def _clean(root: Path, entries: list[_Entry]) -> None:
    for entry in entries:
        target = root / entry.path
        _new_name(target).unlink(missing_ok=True)
        _old_name(target).unlink(missing_ok=True)


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
