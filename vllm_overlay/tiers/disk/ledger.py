# SPDX-License-Identifier: Apache-2.0
"""How many bytes lie under a root, and who may still add some: one small file that all processes lock.

Bytes are granted to a process's *lease* before it writes, move from the lease to ``file_bytes`` in the same locked step
that gives a file its name, and leave ``file_bytes`` in the same locked step that unlinks it. So ``file_bytes`` plus
all leases never exceeds the capacity, whichever process dies when; temporaries are covered by their writer's lease.
"""

import contextlib
import errno
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_overlay.common import file_lock
from vllm_overlay.common.file_lock import TURN_S, lock, try_lock, wait_for_lock
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.checksum import XXH3
from vllm_overlay.tiers.disk.device import Device, make_directory
from vllm_overlay.tiers.disk.format import counted_bytes
from vllm_overlay.tiers.disk.marker import require_marker
from vllm_overlay.tiers.disk.recognition import LEASES, LEDGER, LEDGER_MAGIC
from vllm_overlay.tiers.disk.root import lock_directory

logger = logging.getLogger(__name__)

NUM_SLOTS = 256
_STATE = struct.Struct(f"<8sq{NUM_SLOTS}Q")
_CHECKSUM_BYTES = 16
_FILES_A_LOCK = 64
COUNT_WAIT_S = 300.0
"""For so long another process may count the files of a large root, with the lock held."""


@dataclass(slots=True)
class LedgerState:
    """The ledger's content. ``file_bytes`` is None until someone has counted the files."""

    file_bytes: int | None = None
    leases: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)

    def encode(self) -> bytes:
        body = _STATE.pack(LEDGER_MAGIC, -1 if self.file_bytes is None else self.file_bytes, *self.leases)
        return body + XXH3.checksum_of([body])

    @classmethod
    def decode(cls, raw: bytes) -> "LedgerState":
        """The state in ``raw``; an uncounted one when the bytes are not whole."""
        body, checksum = raw[: _STATE.size], raw[_STATE.size :]
        if len(body) != _STATE.size or checksum != XXH3.checksum_of([body]):
            return cls()
        magic, file_bytes, *leases = _STATE.unpack(body)
        return cls(None if file_bytes < 0 else file_bytes, leases) if magic == LEDGER_MAGIC else cls()

    @staticmethod
    def is_whole(raw: bytes) -> bool:
        """Whether ``raw`` is what ``encode`` makes."""
        return LedgerState.decode(raw).encode() == raw

    def forget_file(self, num_bytes: int) -> None:
        if self.file_bytes is not None:
            self.file_bytes = max(0, self.file_bytes - num_bytes)


class Ledger:
    """The ledger file of one root. Safe to use from several threads and processes.

    Every method takes the lock and may wait for it, so none is called from the scheduler's thread; all raise OSError.
    """

    def __init__(self, root: str, device: Device) -> None:
        self._directory = lock_directory(root)
        self._path = os.path.join(self._directory, LEDGER)
        self._leases = os.path.join(self._directory, LEASES)
        self._device = device

    def check(self) -> None:
        """Lock once. Called at start; raises ConfigError where the file system has no locks."""
        try:
            with self.locked(file_lock.LOCK_WAIT_S):
                pass
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise ConfigError(
                    f"root={self._directory!r} takes no file locks ({error.strerror}): "
                    "set it to a directory of a local file system"
                ) from error
            logger.warning("disk tier: %s cannot be written now: %s", self._path, error)

    @contextlib.contextmanager
    def locked(self, timeout_s: float = COUNT_WAIT_S) -> Iterator[LedgerState]:
        """The state, written back when it has changed, even when the body raises: what was done was done.

        Makes no ledger, and writes over none, in a directory without a marker.
        """
        require_marker(self._directory)
        fd = lock(self._path, timeout_s=timeout_s)
        try:
            before = os.pread(fd, _STATE.size + _CHECKSUM_BYTES, 0)
            state = LedgerState.decode(before)
            try:
                yield state
            finally:
                after = state.encode()
                if after != before:
                    _write(fd, after)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def locked_for_reading(self) -> Iterator[bytes]:
        """The ledger's bytes, for a tool that changes nothing; raises OSError, FileNotFoundError when there is none."""
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            wait_for_lock(fd, self._path, shared=True)
            yield os.pread(fd, _STATE.size + _CHECKSUM_BYTES + 1, 0)
        finally:
            os.close(fd)

    def claim_slot(self) -> tuple[int, int]:
        """A lease of this process: its slot and the descriptor that holds it until closed (or the process ends)."""
        require_marker(self._directory)
        make_directory(self._device, self._leases)
        with contextlib.ExitStack() as undo:
            with self.locked() as state:
                slot, fd = self._lock_any_slot(state)
                undo.callback(os.close, fd)
                state.leases[slot] = 0
            undo.pop_all()  # it is written: nobody else believes that these bytes are leased
            return slot, fd

    def _lock_any_slot(self, state: LedgerState) -> tuple[int, int]:
        """One with an empty lease, if there is any. A slot that cannot be locked, say a directory, is passed by."""
        refusal = OSError(f"{NUM_SLOTS} processes share {self._path} already")
        for slot in sorted(range(NUM_SLOTS), key=lambda slot: state.leases[slot] > 0):
            try:
                fd = self._lock_slot(slot)
            except OSError as error:
                refusal = error
                continue
            if fd is not None:
                return slot, fd
        raise refusal

    def _lock_slot(self, slot: int) -> int | None:
        return try_lock(self.path_of_slot(slot))

    def _is_slot_held(self, slot: int) -> bool:
        """Whether a process holds it. What lies there and is no file is held by nobody: its owner has noticed."""
        try:
            fd = self._lock_slot(slot)
        except OSError:
            if stat.S_ISREG(os.lstat(self.path_of_slot(slot)).st_mode):
                raise
            return False
        if fd is not None:
            os.close(fd)
        return fd is None

    def path_of_slot(self, slot: int) -> str:
        """The file that the owner of this lease keeps locked."""
        return os.path.join(self._leases, str(slot))

    def dead_slots(self, state: LedgerState) -> list[int]:
        """Slots with bytes that no living process holds. Call with the lock held."""
        return [slot for slot, num_bytes in enumerate(state.leases) if num_bytes and not self._is_slot_held(slot)]

    def count_processes(self) -> int:
        """How many leases of this root are held now."""
        with self.locked():
            return sum(self._is_slot_held(int(name)) for name in os.listdir(self._leases) if name.isdecimal())

    def reconcile(self, count_files: Callable[[], int]) -> None:
        """Count the files anew and free the leases of the dead. Writers and removers wait meanwhile."""
        with self.locked() as state:
            state.file_bytes = count_files()
            for slot in self.dead_slots(state):
                state.leases[slot] = 0

    def publish(self, slot: int, temporary: str, target: str) -> bool:
        """Give a finished temporary its name and take its bytes from the lease of ``slot``.

        Called by a worker's write thread. False, and nothing changed, when the lease does not cover it. What had the
        name before, say another process's file of the same object, is replaced and comes off the ledger.
        """
        with self.locked() as state:
            num_bytes = self._device.lstat(temporary).st_size
            if state.file_bytes is None or state.leases[slot] < num_bytes:
                return False
            replaced = self._size_of(target)
            self._device.rename(temporary, target)
            state.leases[slot] -= num_bytes
            state.file_bytes += num_bytes
            state.forget_file(replaced)
            return True

    def retire(self, slot: int, renames: Sequence[tuple[str, str]], most_bytes: int) -> int:
        """Give files of one size temporary names and their bytes to the lease of ``slot``; returns the bytes.

        0, and nothing changed, when a file is missing, they differ in size, or are more than ``most_bytes`` together.
        Raises OSError; then some files may have their temporary names, and their bytes are the lease's.
        """
        with self.locked() as state:
            sizes = [self._size_of(path) for path, _ in renames]
            is_one_object = all(sizes) and len(set(sizes)) == 1
            if state.file_bytes is None or not is_one_object or sum(sizes) > most_bytes:
                return 0
            for (path, temporary), num_bytes in zip(renames, sizes, strict=True):
                self._device.rename(path, temporary)
                state.forget_file(num_bytes)
                state.leases[slot] += num_bytes
            return sum(sizes)

    def _size_of(self, path: str) -> int:
        try:
            return counted_bytes(self._device.lstat(path).st_size)
        except FileNotFoundError:
            return 0

    def remove_files(self, paths: Sequence[str]) -> int:
        """Unlink files and take their bytes off the ledger; returns the bytes. Missing files count nothing.

        Locks anew for every few files, so that writers get a turn.
        """
        removed = 0
        for start in range(0, len(paths), _FILES_A_LOCK):
            with self.locked() as state:
                locked = time.monotonic()
                removed += sum(self._unlink(state, path) for path in paths[start : start + _FILES_A_LOCK])
            time.sleep(min(TURN_S, time.monotonic() - locked))  # who waits asks every 2 ms at most
        return removed

    def _unlink(self, state: LedgerState, path: str) -> int:
        try:
            num_bytes = counted_bytes(self._device.lstat(path).st_size)
            self._device.unlink(path)
        except OSError:
            return 0
        state.forget_file(num_bytes)
        return num_bytes


def _write(fd: int, raw: bytes) -> None:
    """Replace the ledger; where that fails, empty it, so that the files are counted anew. Raises OSError."""
    try:
        os.pwrite(fd, raw, 0)
    except OSError:
        os.ftruncate(fd, 0)
        raise
