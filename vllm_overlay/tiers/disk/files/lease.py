# SPDX-License-Identifier: Apache-2.0
"""Which machine a host's sub-root belongs to: on a file system whose locks do not reach other machines."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from blake3 import blake3

from vllm_overlay.common.file_lock import is_in_place
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device, write_all
from vllm_overlay.tiers.disk.files.mounts import ROLLBACK
from vllm_overlay.tiers.disk.files.recognition import LEASE
from vllm_overlay.tiers.disk.files.root import Root, reopen_root

RENEW_S = 5.0
WAIT_S = 30.0
"""A machine that has not renewed its lease for so long is taken to be gone."""
SETTLE_S = 1.0
"""So much later a machine looks whether another one took the lease in the same moment."""
_POLL_S = 0.5
_NUM_BYTES = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
logger = logging.getLogger(__name__)


class _Words(msgspec.Struct, frozen=True):
    """The file's content. ``machine`` is empty after a release."""

    machine: str = ""
    host: str = ""
    counter: int = 0


class Lease:
    """The scheduler's half takes it; all engines of one machine share it. Not thread-safe."""

    def __init__(
        self,
        device: Device,
        root: Root,
        machine: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device, self._clock, self._sleep = device, clock, sleep
        self._root = root
        self._path = os.path.join(root.path, LEASE)
        self._machine = machine
        self._written = ""
        self._fd = -1
        self.is_held = False
        """Whether this machine had it when it last asked."""
        self._renew_at = 0.0
        self._settles_at = 0.0
        self._others = b""
        """What another machine wrote, when that was seen first, and whether it has changed since we look."""
        self._others_since = 0.0
        self._others_lives = False

    def take(self) -> None:
        """Called at start. Waits ``WAIT_S`` for a machine that may be gone.

        Raises ConfigError when another one lives, and OSError when the file system cannot say: ``renew`` tries again.
        """
        while not self._step():
            if self._others_lives:
                raise ConfigError(self._refusal())
            self._sleep(_POLL_S)

    def renew(self) -> None:
        """Called often by the bookkeeper's thread; does something every ``RENEW_S``.

        Raises OSError, with a sentence, while this machine does not have the lease. Then nothing below the sub-root may
        be touched, and the next call tries to get it.
        """
        if self.is_held and self._clock() < self._renew_at:
            return
        self.is_held = False
        if not self._step():
            raise OSError(self._refusal())

    def release(self) -> None:
        """At a clean end: the next machine need not wait. Raises OSError."""
        try:
            if self.is_held and self._fd >= 0:
                with contextlib.suppress(BlockingIOError):  # another engine of this machine goes on
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._write(_Words())
        finally:
            self.is_held = False
            self._close()

    def _step(self) -> bool:
        """One attempt to get or to keep the lease, and whether we have it."""
        now = self._clock()
        try:
            raw = self._read()
        except FileNotFoundError:  # somebody has removed the sub-root
            reopen_root(self._device, self._root)
            raw = self._read()
        words = _decode(raw)
        machine = self._machine or _this_mount(self._root.path)
        if self._fd >= 0 and (machine != self._written or not is_in_place(self._path, self._fd)):
            self._close()  # mounted anew, or removed: our lock lies on what is gone
        if words.machine and words.machine in (machine, self._written):
            self.is_held = now >= self._settles_at
            self._share()
        elif words.machine and raw != self._others:
            self._others_lives = bool(self._others)
            self._others, self._others_since = raw, now
            if not self._others_lives:
                logger.warning("%s. If it is gone, this takes at most %.0f s", self._refusal(), WAIT_S)
            return False
        elif words.machine and now - self._others_since < WAIT_S:
            return False
        else:
            if words.machine:
                logger.warning("disk tier: %s was not renewed for %.0f s: taken over", self._path, WAIT_S)
            self._settles_at = now + SETTLE_S
        self._others, self._others_lives = b"", False
        self._written, self._renew_at = machine, now + RENEW_S
        try:
            self._write(_Words(machine, socket.gethostname()[:64], time.time_ns()))
        except OSError as error:  # on a full disk it goes on: what it is about to evict makes room
            if not self.is_held or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return self.is_held

    def _read(self) -> bytes:
        """A new descriptor each time: that is when network file systems ask their server."""
        memory = bytearray(_NUM_BYTES)
        fd = self._device.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            return bytes(memory[: self._device.preadv(fd, [memoryview(memory)], 0)])
        finally:
            self._device.close(fd)

    def _write(self, words: _Words) -> None:
        """Always as many bytes, in place: no other machine reads a part."""
        fd = self._device.open(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            write_all(self._device, fd, [memoryview(msgspec.json.encode(words).ljust(_NUM_BYTES - 1) + b"\n")])
        finally:
            self._device.close(fd)

    def _share(self) -> None:
        """Shows the other engines of this machine that one more has the lease."""
        if self._fd < 0:
            self._fd = self._device.open(self._path, os.O_RDWR)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # another one is just giving it back: the next renewal shows it
                self._close()

    def _refusal(self) -> str:
        directory, host = os.path.dirname(self._path), _decode(self._others).host[:64]
        if not self._others:
            return f"disk tier: {directory} is being taken, unless another machine does so in this moment"
        return (
            f"disk tier: {directory} is in use by another machine that has the same host_name, "
            f"{host!a}: set host_name to a name that no other machine has"
        )

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # of a server that died: the number is free all the same
                self._device.close(fd)


def take_lease(device: Device, root: Root) -> Lease | None:
    """The lease of a host's sub-root; a local root needs none. Called at start by the scheduler's half. Raises
    ConfigError."""
    if root.journal != ROLLBACK:
        return None
    lease = Lease(device, root)
    try:
        lease.take()
    except OSError as error:
        logger.warning("disk tier: the lease of %s cannot be had now: %s", root.path, error)
    return lease


def host_elsewhere(root: str) -> str:
    """The host that has a sub-root, if its locks are not seen here; empty where nobody has it, or who has it sees the
    same. For tools. Raises OSError."""
    try:
        with open(os.path.join(root, LEASE), "rb") as file:
            words = _decode(file.read(_NUM_BYTES))
    except FileNotFoundError:
        return ""
    return "" if words.machine in ("", _this_mount(root)) else words.host or "unknown"


def _decode(raw: bytes) -> _Words:
    """What cannot be read is some machine's, which may be about to write it."""
    if not raw.strip():
        return _Words()
    try:
        return msgspec.json.decode(raw, type=_Words)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Words("unknown", "unknown")


def _this_mount(path: str) -> str:
    """Names the processes that see the same locks: those of one running kernel that use the same mount.

    Two pods of one machine may each have a mount of their own, whose locks do not meet.
    """
    try:
        kernel = _BOOT_ID.read_bytes()
    except OSError:
        kernel = os.fsencode(socket.gethostname())
    return blake3(kernel + b":%d" % os.stat(path).st_dev).hexdigest(8)
