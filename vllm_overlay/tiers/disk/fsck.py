# SPDX-License-Identifier: Apache-2.0
"""Everything that can be wrong under a root: found by reading every byte, repaired by removing what does not verify.

Nothing is followed, and nothing that is not ours by its name and place is ever changed. It may run while others serve:
what they may be about to finish is a note, not a problem.
"""

import contextlib
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_overlay import versions
from vllm_overlay.common.file_lock import is_held
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity, is_encrypted
from vllm_overlay.tiers.disk.device import DIRECTORY_MODE, FILE_MODE, Device, is_temporary
from vllm_overlay.tiers.disk.format import ObjectHeader
from vllm_overlay.tiers.disk.ledger import NUM_SLOTS, Ledger, LedgerState
from vllm_overlay.tiers.disk.listing import FoundObject, parents_first
from vllm_overlay.tiers.disk.manifest import manifest_or_empty, read_manifest
from vllm_overlay.tiers.disk.marker import MARKER, mark_old_root
from vllm_overlay.tiers.disk.namespace import DESCRIPTION, FINGERPRINT, IN_USE, parse_file_name
from vllm_overlay.tiers.disk.object_file import BadObject, verify_file
from vllm_overlay.tiers.disk.recognition import LEASES, LEDGER, WEIGHT_FILES, RootKind, require_root
from vllm_overlay.tiers.disk.root import in_use_path
from vllm_overlay.tiers.disk.scan import FAN_OUT, FoundFile, count_files, is_orphan, scan_objects
from vllm_overlay.tiers.disk.usage import is_made_to_be_shared

_OF_THE_ROOT = WEIGHT_FILES | {LEDGER, MARKER}
_SHARED_BITS = stat.S_ISGID | stat.S_IRWXG
_SLOTS = frozenset(map(str, range(NUM_SLOTS)))


class What(StrEnum):
    """What a finding is about."""

    HEADER = "header"
    """The header does not verify, or is that of another object; or the file is no regular one."""
    SIZE = "size"
    CHECKSUM = "checksum"
    UNREADABLE = "unreadable"
    PLACE = "place"
    """It has an object's name and does not lie where that object belongs."""
    MODE = "mode"
    OWNER = "owner"
    INCOMPLETE = "incomplete"
    """Not every rank has a file, or they do not say the same."""
    UNREACHABLE = "unreachable"
    """An object that it depends on is not there."""
    LEFTOVER = "leftover"
    """A temporary that nobody will finish."""
    MARKER = "marker"
    """Of a root that an earlier version made, or one that does not verify."""
    LEDGER = "ledger"
    KEY = "key"
    """A namespace whose checksums need a key that is not the given one: nothing of it was verified."""
    VERSION = "version"
    """A namespace whose objects have another version of the disk format: nothing of it was verified."""
    MANIFEST = "manifest"
    """A namespace.json that cannot be read."""
    STRANGER = "stranger"
    """Not ours: never opened, never changed. A problem only in the place of a lease's lock."""


@dataclass(slots=True)
class Finding:
    """``path`` is relative to the root. What is no problem is a note: it costs nothing and needs no repair."""

    path: str
    what: What
    detail: str = ""
    is_problem: bool = True
    is_repaired: bool = False


@dataclass(slots=True)
class Report:
    """Files and bytes are those of objects; an object counts when all its ranks' files verify and it can be reached."""

    num_namespaces: int = 0
    num_files: int = 0
    num_bytes: int = 0
    num_objects: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_problem]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, or nothing is any more."""
        return all(finding.is_repaired for finding in self.problems)


@dataclass(slots=True)
class _Namespace:
    fingerprint: str
    is_in_use: bool
    found: list[FoundObject] = field(default_factory=list)

    @property
    def chunks(self) -> list[FoundObject]:
        return [item for item in self.found if not item.planned.object_id.is_snapshot]

    @property
    def snapshots(self) -> list[FoundObject]:
        return [item for item in self.found if item.planned.object_id.is_snapshot]


class Check:
    """One run over one root. ``on_bytes(done, total)`` hears how far it is."""

    def __init__(
        self,
        root: str,
        repair: bool = False,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
        device: Device | None = None,
        integrity: Integrity = XXH3,
    ) -> None:
        self._root = os.path.abspath(root)
        self._repair = repair
        self._on_bytes = on_bytes
        self._device = device or Device()
        self._integrity = integrity
        self._ledger = Ledger(self._root, self._device)
        self._report = Report()
        self._files: dict[str, list[FoundFile]] = {}
        self._done = self._total = 0
        self._has_unread = False
        """Whether something could not be read: then nobody knows what is not there."""

    def run(self) -> Report:
        """Raises OSError when the root itself cannot be read, and NotARootError when it is none."""
        kind = require_root(self._root)
        state = os.stat(self._root)
        self._owner = state.st_uid
        self._is_shared = is_made_to_be_shared(self._root, state.st_mode, has_key=bool(self._integrity.key))
        self._check_marker(kind)
        self._check_mode("", state.st_mode)
        self._walk()
        self._total = sum(file.num_bytes for files in self._files.values() for file in files)
        namespaces = [
            self._read_namespace(fingerprint, candidates)
            for fingerprint in sorted(self._files)
            if (candidates := self._integrities_of(fingerprint))
        ]
        self._check_reach(namespaces)
        self._check_ledger()
        self._report.num_namespaces = len(self._files)
        return self._report

    # Findings.

    def _note(self, path: str, what: What, detail: str) -> None:
        self._report.findings.append(Finding(self._relative(path), what, detail, is_problem=False))

    def _problem(self, path: str, what: What, detail: str, repair: Callable[[], bool]) -> None:
        is_repaired = False
        if self._repair:
            with contextlib.suppress(OSError):
                is_repaired = repair()
        self._report.findings.append(Finding(self._relative(path), what, detail, is_repaired=is_repaired))

    def _remove(self, path: str, what: What, detail: str) -> None:
        """A problem whose repair is to remove the file."""

        def removed() -> bool:
            self._ledger.remove_files([path])
            return not os.path.lexists(path)

        self._problem(path, what, detail, removed)

    def _unread(self, path: str, detail: str) -> None:
        """A problem that has no repair but to try again."""
        self._has_unread = True
        self._problem(path, What.UNREADABLE, detail, lambda: False)

    def _relative(self, path: str) -> str:
        return os.path.relpath(os.path.join(self._root, path), self._root)

    # Names, types, modes.

    def _entries(self, path: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """What a directory holds, each with its own state, never that of what it links to."""
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            self._unread(path, str(error.strerror))
            return
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry, entry.stat(follow_symlinks=False)

    def _walk(self) -> None:
        for entry, state in self._entries(self._root):
            is_directory = stat.S_ISDIR(state.st_mode)
            if is_directory and FINGERPRINT.fullmatch(entry.name):
                self._check_mode(entry.path, state.st_mode)
                self._files[entry.name] = []
                self._walk_namespace(entry.name, entry.path)
            elif is_directory and entry.name == LEASES:
                self._walk_leases(entry.path)
            else:
                self._walk_other(entry, state, _OF_THE_ROOT)

    def _walk_leases(self, path: str) -> None:
        for entry, state in self._entries(path):
            is_slot = entry.name in _SLOTS
            if is_slot and not stat.S_ISREG(state.st_mode):
                self._problem(entry.path, What.STRANGER, f"{_type(state)} in the place of a lock", lambda: False)
            elif not is_slot:
                self._note(entry.path, What.STRANGER, _type(state))

    def _walk_namespace(self, fingerprint: str, path: str) -> None:
        for entry, state in self._entries(path):
            if stat.S_ISDIR(state.st_mode) and FAN_OUT.fullmatch(entry.name):
                self._check_mode(entry.path, state.st_mode)
                for file, file_state in self._entries(entry.path):
                    self._walk_file(fingerprint, entry.name, file, file_state)
            else:
                self._walk_other(entry, state, {IN_USE, DESCRIPTION})
        try:
            read_manifest(path)
        except (OSError, ValueError) as error:
            self._note(os.path.join(path, DESCRIPTION), What.MANIFEST, str(error))

    def _walk_other(self, entry: os.DirEntry[str], state: os.stat_result, known: frozenset[str] | set[str]) -> None:
        """What is no directory of ours and no object."""
        if is_temporary(entry.name) and stat.S_ISREG(state.st_mode):
            self._check_temporary(entry, state)
        elif not (entry.name in known and stat.S_ISREG(state.st_mode)):
            self._note(entry.path, What.STRANGER, _type(state))

    def _walk_file(self, fingerprint: str, fan_out: str, entry: os.DirEntry[str], state: os.stat_result) -> None:
        parsed = parse_file_name(entry.name)
        if parsed is None:
            self._walk_other(entry, state, frozenset())
        elif stat.S_ISDIR(state.st_mode):
            self._note(entry.path, What.STRANGER, _type(state))
        elif not stat.S_ISREG(state.st_mode):
            self._remove(entry.path, What.HEADER, f"an object's name and {_type(state)}")
        elif parsed[0].key[:1].hex() != fan_out:
            self._remove(entry.path, What.PLACE, f"it belongs into {parsed[0].key[:1].hex()}")
        else:
            self._check_mode(entry.path, state.st_mode)
            if state.st_uid != self._owner:
                self._remove(entry.path, What.OWNER, f"it belongs to user {state.st_uid}")
            found = FoundFile(entry.path, entry.name, state.st_size, state.st_mtime)
            self._files[fingerprint].append(found)

    def _check_temporary(self, entry: os.DirEntry[str], state: os.stat_result) -> None:
        if is_orphan(FoundFile(entry.path, entry.name, state.st_size, state.st_mtime)):
            self._remove_quietly(entry.path, f"{state.st_size} bytes, {_age(state.st_mtime)} old")
        else:
            self._note(entry.path, What.LEFTOVER, "its writer lives")

    def _remove_quietly(self, path: str, detail: str) -> None:
        """A temporary: no ledger knows its bytes, its writer's lease covers them."""

        def removed() -> bool:
            self._device.unlink(path)
            return True

        self._problem(path, What.LEFTOVER, detail, removed)

    def _check_marker(self, kind: RootKind) -> None:
        if kind is RootKind.MARKED:
            self._check_mode(MARKER, os.lstat(os.path.join(self._root, MARKER)).st_mode)
            return

        def marked() -> bool:
            mark_old_root(self._device, self._root)
            return True

        if os.path.lexists(os.path.join(self._root, MARKER)):
            self._problem(MARKER, What.MARKER, "it does not verify", marked)
        elif self._repair:
            self._note(MARKER, What.MARKER, "missing, as in roots of before 0.3.0: made now")
            marked()
        else:
            self._note(MARKER, What.MARKER, "missing, as in roots of before 0.3.0: the next start makes it")

    def _check_mode(self, path: str, mode: int) -> None:
        wanted = DIRECTORY_MODE if stat.S_ISDIR(mode) else FILE_MODE
        if self._is_shared and stat.S_ISDIR(mode):
            wanted |= mode & _SHARED_BITS
        if stat.S_IMODE(mode) == wanted:
            return

        def changed() -> bool:
            fd = os.open(os.path.join(self._root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(fd, wanted)
            finally:
                os.close(fd)
            return True

        self._problem(path, What.MODE, f"{stat.S_IMODE(mode):04o} instead of {wanted:04o}", changed)

    # Bytes.

    def _integrities_of(self, fingerprint: str) -> tuple[Integrity, ...]:
        """What the namespace's files may be verified with: what its words say, or both where there are none."""
        manifest = manifest_or_empty(os.path.join(self._root, fingerprint))
        if manifest.object_format != versions.DISK_OBJECT:
            detail = f"not verified: its objects have version {manifest.object_format} of the disk format"
            self._note(fingerprint, What.VERSION, detail)
            return ()
        said = manifest.integrity
        known = tuple(dict.fromkeys((self._integrity, XXH3)))
        chosen = tuple(integrity for integrity in known if said in ("", integrity.name))
        if not chosen:
            option = "--encryption-key-file" if is_encrypted(said) else "--integrity-key-file"
            self._note(fingerprint, What.KEY, f"not verified: {option} with the key {said} is needed")
        return chosen

    def _read_namespace(self, fingerprint: str, integrities: tuple[Integrity, ...]) -> _Namespace:
        namespace = _Namespace(fingerprint, is_held(in_use_path(self._root, fingerprint)))
        by_object: defaultdict[ObjectId, dict[int, tuple[FoundFile, ObjectHeader]]] = defaultdict(dict)
        for file in self._files[fingerprint]:
            parsed = parse_file_name(file.name)
            assert parsed is not None
            header = self._read(fingerprint, parsed, file, integrities)
            if header is not None:
                by_object[parsed[0]][parsed[1]] = file, header
        for ranks in by_object.values():
            files = tuple(file for file, _ in ranks.values())
            planned = {header.planned for _, header in ranks.values()}
            worlds = {header.world_size for _, header in ranks.values()}
            if len(planned) == 1 and len(worlds) == 1 and len(ranks) == worlds.pop():
                mtime = max(file.mtime for file in files)
                namespace.found.append(FoundObject(planned.pop(), mtime, files))
            else:
                detail = f"ranks {', '.join(map(str, sorted(ranks)))} are not all there are, or do not say the same"
                self._not_whole(namespace, files, What.INCOMPLETE, detail)
        return namespace

    def _read(
        self, fingerprint: str, parsed: tuple[ObjectId, int], file: FoundFile, integrities: tuple[Integrity, ...]
    ) -> ObjectHeader | None:
        """The header of a file that verifies and is what its name and place say."""
        before = self._done
        try:
            header = self._verify(file.path, integrities)
            if (header.fingerprint.hex(), (header.object_id, header.rank)) != (fingerprint, parsed):
                raise BadObject(Reason.HEADER)
        except BadObject as bad:
            detail = f"{file.num_bytes} bytes: {bad.__cause__ or bad.reason}"
            if not bad.is_bad:
                self._unread(file.path, detail)
            elif bad.reason != Reason.MISSING and os.path.lexists(file.path):  # else it was evicted meanwhile
                self._remove(file.path, What(bad.reason), detail)
            return None
        finally:
            self._done = before
            self._count(file.num_bytes)
        self._report.num_files += 1
        self._report.num_bytes += file.num_bytes
        return header

    def _verify(self, path: str, integrities: tuple[Integrity, ...]) -> ObjectHeader:
        for integrity in integrities[:-1]:
            try:
                return verify_file(self._device, path, self._count, integrity)
            except BadObject as bad:
                if not bad.is_bad:
                    raise
        return verify_file(self._device, path, self._count, integrities[-1])

    def _count(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._on_bytes(self._done, self._total)

    def _not_whole(self, namespace: _Namespace, files: tuple[FoundFile, ...], what: What, detail: str) -> None:
        for file in files:
            if namespace.is_in_use:
                self._note(file.path, what, f"{detail}; served now, so it may be on its way")
            elif self._has_unread:
                self._problem(file.path, what, f"{detail}; it stays while something cannot be read", lambda: False)
            else:
                self._remove(file.path, what, detail)

    # Reach.

    def _check_reach(self, namespaces: list[_Namespace]) -> None:
        reachable: dict[str, set[ObjectId]] = {}
        for namespace in namespaces:
            good, lost = parents_first(namespace.chunks)
            reachable[namespace.fingerprint] = {item.planned.object_id for item in good}
            self._report.num_objects += len(good)
            self._lost(namespace, lost)
        for namespace in namespaces:
            attention = manifest_or_empty(os.path.join(self._root, namespace.fingerprint)).attention
            candidates = [reachable.get(attention, set())] if attention else list(reachable.values())
            lost = [
                item
                for item in namespace.snapshots
                if not any(chunks.issuperset(item.planned.parents) for chunks in candidates)
            ]
            self._report.num_objects += len(namespace.snapshots) - len(lost)
            self._lost(namespace, lost)

    def _lost(self, namespace: _Namespace, items: list[FoundObject]) -> None:
        for item in items:
            self._not_whole(namespace, item.files, What.UNREACHABLE, "an object below it is missing")

    # The ledger.

    def _check_ledger(self) -> None:
        try:
            with self._ledger.locked_for_reading() as raw:
                num_bytes = sum(
                    file.num_bytes for fingerprint in self._files for file in scan_objects(self._root, fingerprint)
                )
        except FileNotFoundError:
            if self._files:
                self._note("ledger", What.LEDGER, "missing: the next process counts")
            return
        except OSError as error:
            self._problem("ledger", What.LEDGER, str(error), lambda: False)
            return
        state = LedgerState.decode(raw)
        leased = sum(state.leases)
        if not LedgerState.is_whole(raw):
            self._problem("ledger", What.LEDGER, "it does not verify", self._reconcile)
        elif state.file_bytes is not None and state.file_bytes + leased < num_bytes:
            detail = f"it covers {state.file_bytes} + {leased} leased of {num_bytes} bytes"
            self._problem("ledger", What.LEDGER, detail, self._reconcile)
        elif state.file_bytes != num_bytes:
            self._note("ledger", What.LEDGER, f"it says {state.file_bytes} of {num_bytes} bytes: the next start counts")

    def _reconcile(self) -> bool:
        self._ledger.reconcile(lambda: count_files(self._root, self._device))
        return True


def _type(state: os.stat_result) -> str:
    names = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    names |= {stat.S_IFDIR: "a directory", stat.S_IFREG: "a file"}
    return names.get(stat.S_IFMT(state.st_mode), "a device")


def _age(mtime: float) -> str:
    return f"{max(0.0, time.time() - mtime):.0f} s"
