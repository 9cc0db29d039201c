# SPDX-License-Identifier: Apache-2.0
"""Names, types, owners and modes of all that lies under a root. No file is opened but ``namespace.json`` and
``learned.json``."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator

from vllm_overlay.tiers.disk.catalogue.generations import MEMBERS, is_catalogue_name
from vllm_overlay.tiers.disk.catalogue.rows import NUM_SLOTS
from vllm_overlay.tiers.disk.files.device import DIRECTORY_MODE, FILE_MODE, Device, is_temporary
from vllm_overlay.tiers.disk.files.learned_file import check_learned
from vllm_overlay.tiers.disk.files.manifest import read_manifest
from vllm_overlay.tiers.disk.files.marker import MARKER
from vllm_overlay.tiers.disk.files.namespace import DESCRIPTION, FINGERPRINT, IN_USE, LEARNED, parse_file_name
from vllm_overlay.tiers.disk.files.recognition import LEASES, LEDGER, WEIGHT_FILES, RootKind
from vllm_overlay.tiers.disk.files.scan import FAN_OUT, FoundFile, is_orphan
from vllm_overlay.tiers.disk.maintenance.catalogue_access import bring_up_to_date
from vllm_overlay.tiers.disk.maintenance.findings import Findings, What
from vllm_overlay.tiers.disk.maintenance.guarded_catalogue import GuardedCatalogue
from vllm_overlay.tiers.disk.maintenance.usage import is_made_to_be_shared

_OF_THE_ROOT = WEIGHT_FILES | {MARKER}
_SHARED_BITS = stat.S_ISGID | stat.S_IRWXG
_SLOTS = frozenset(map(str, range(NUM_SLOTS)))


class Walk:
    """One walk. ``files`` are those with an object's name in an object's place, by fingerprint."""

    def __init__(self, findings: Findings, kind: RootKind, device: Device, has_key: bool) -> None:
        self.files: dict[str, list[FoundFile]] = {}
        self._findings = findings
        self._root = findings.root
        self._kind = kind
        self._device = device
        self._has_key = has_key
        self._state = os.stat(self._root)
        self._is_shared = is_made_to_be_shared(self._root, self._state.st_mode, has_key)

    def check_root(self) -> None:
        """Checks the root's marker and its mode. Raises ConfigError where a version before 0.3.0 uses what is to be
        repaired."""
        self._check_marker()
        self._check_mode("", self._state.st_mode)

    def run(self, catalogue: GuardedCatalogue) -> None:
        """Walks everything below the root."""
        self._catalogue = catalogue
        for entry, state in self._entries(self._root):
            is_directory = stat.S_ISDIR(state.st_mode)
            if is_directory and FINGERPRINT.fullmatch(entry.name):
                self._check_mode(entry.path, state.st_mode)
                self.files[entry.name] = []
                self._walk_namespace(entry.name, entry.path)
            elif is_directory and entry.name == MEMBERS:
                self._walk_members(entry.path)
            elif is_directory and entry.name == LEDGER:  # keeps versions before 0.3.0 away
                self._walk_ledger(entry.path)
            elif not self._is_of_old_root(entry.name):
                self._walk_other(entry, state, is_known=entry.name in _OF_THE_ROOT or is_catalogue_name(entry.name))

    def _is_of_old_root(self, name: str) -> bool:
        return self._kind is RootKind.OLD and name in (LEDGER, LEASES)

    def _entries(self, path: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """What a directory holds. Each entry has its own state, never that of what it links to."""
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            self._findings.unread(path, str(error.strerror))
            return
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry, entry.stat(follow_symlinks=False)

    def _walk_members(self, path: str) -> None:
        for entry, state in self._entries(path):
            is_slot = entry.name in _SLOTS
            if is_slot and not stat.S_ISREG(state.st_mode):
                self._findings.problem(entry.path, What.STRANGER, f"{_type(state)} in the place of a lock")
            elif not is_slot:
                self._findings.note(entry.path, What.STRANGER, _type(state))

    def _walk_ledger(self, path: str) -> None:
        for entry, state in self._entries(path):
            self._findings.note(entry.path, What.STRANGER, _type(state))

    def _walk_namespace(self, fingerprint: str, path: str) -> None:
        for entry, state in self._entries(path):
            if stat.S_ISDIR(state.st_mode) and FAN_OUT.fullmatch(entry.name):
                self._check_mode(entry.path, state.st_mode)
                for file, file_state in self._entries(entry.path):
                    self._walk_file(fingerprint, entry.name, file, file_state)
            else:
                self._walk_other(entry, state, is_known=entry.name in (IN_USE, DESCRIPTION, LEARNED))
        try:
            read_manifest(path)
        except (OSError, ValueError) as error:
            self._findings.note(os.path.join(path, DESCRIPTION), What.MANIFEST, str(error))
        try:
            check_learned(self._root, path)
        except (OSError, ValueError) as error:
            self._findings.note(os.path.join(path, LEARNED), What.LEARNED, str(error))

    def _walk_other(self, entry: os.DirEntry[str], state: os.stat_result, is_known: bool) -> None:
        """What is no directory of ours and no object."""
        if is_temporary(entry.name) and stat.S_ISREG(state.st_mode):
            self._check_temporary(entry, state)
        elif not (is_known and stat.S_ISREG(state.st_mode)):
            self._findings.note(entry.path, What.STRANGER, _type(state))

    def _walk_file(self, fingerprint: str, fan_out: str, entry: os.DirEntry[str], state: os.stat_result) -> None:
        parsed = parse_file_name(entry.name)
        if parsed is None:
            self._walk_other(entry, state, is_known=False)
        elif stat.S_ISDIR(state.st_mode):
            self._findings.note(entry.path, What.STRANGER, _type(state))
        elif parsed[0].key[:1].hex() != fan_out:
            detail = f"it belongs into {parsed[0].key[:1].hex()}"
            self._findings.problem(entry.path, What.PLACE, detail, lambda: self._catalogue.remove_file(entry.path))
        elif not stat.S_ISREG(state.st_mode):
            self._remove(fingerprint, entry.path, What.HEADER, f"an object's name and {_type(state)}")
        else:
            self._check_mode(entry.path, state.st_mode)
            if state.st_uid != self._state.st_uid:
                self._remove(fingerprint, entry.path, What.OWNER, f"it belongs to user {state.st_uid}")
            found = FoundFile(entry.path, entry.name, state.st_size, state.st_mtime)
            self.files[fingerprint].append(found)

    def _remove(self, fingerprint: str, path: str, what: What, detail: str) -> None:
        repair = self._catalogue.remove_object_of
        self._findings.problem(path, what, detail, lambda: repair(fingerprint, path))

    def _check_temporary(self, entry: os.DirEntry[str], state: os.stat_result) -> None:
        if is_orphan(FoundFile(entry.path, entry.name, state.st_size, state.st_mtime)):
            detail = f"{state.st_size} bytes, {_age(state.st_mtime)} old"
            self._findings.problem(entry.path, What.LEFTOVER, detail, lambda: self._catalogue.remove_file(entry.path))
        else:
            self._findings.note(entry.path, What.LEFTOVER, "its writer lives")

    def _check_marker(self) -> None:
        if self._kind is RootKind.MARKED:
            self._check_mode(MARKER, os.lstat(os.path.join(self._root, MARKER)).st_mode)
        elif not os.path.lexists(os.path.join(self._root, MARKER)):
            when = "made now" if self._findings.repair else "the next start makes it"
            self._findings.note(MARKER, What.MARKER, f"missing, as in roots of before 0.3.0: {when}")
            if self._findings.repair:
                self._bring_up_to_date()
        else:
            detail = "of a version before 0.3.0, or it does not verify"
            self._findings.problem(MARKER, What.MARKER, detail, self._bring_up_to_date)

    def _bring_up_to_date(self) -> bool:
        bring_up_to_date(self._root, self._device, self._kind)
        return True

    def _check_mode(self, path: str, mode: int) -> None:
        wanted = DIRECTORY_MODE if stat.S_ISDIR(mode) else FILE_MODE
        if self._is_shared and stat.S_ISDIR(mode):
            wanted |= mode & _SHARED_BITS
        if stat.S_IMODE(mode) != wanted:
            detail = f"{stat.S_IMODE(mode):04o} instead of {wanted:04o}"
            self._findings.problem(path, What.MODE, detail, lambda: self._set_mode(path, wanted))

    def _set_mode(self, path: str, wanted: int) -> bool:
        fd = os.open(os.path.join(self._root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, wanted)
        finally:
            os.close(fd)
        return True


def _type(state: os.stat_result) -> str:
    names = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    names |= {stat.S_IFDIR: "a directory", stat.S_IFREG: "a file"}
    return names.get(stat.S_IFMT(state.st_mode), "a device")


def _age(mtime: float) -> str:
    return f"{max(0.0, time.time() - mtime):.0f} s"
