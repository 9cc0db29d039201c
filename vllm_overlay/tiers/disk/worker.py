# SPDX-License-Identifier: Apache-2.0
"""The byte half of the disk tier: stages, writes, reads and verifies what tickets name."""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_overlay.common.circuit_breaker import FIRST_PAUSE_S, CircuitBreaker
from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.common.reasons import Reason
from vllm_overlay.tiers.base import FetchResult, LoadTicket, StoreResult, StoreTicket, TierWorker
from vllm_overlay.tiers.disk.files.checksum import Seal, integrity_of
from vllm_overlay.tiers.disk.files.device import Device, make_room_for_descriptors
from vllm_overlay.tiers.disk.files.format import Identity, ObjectHeader
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.files.object_file import BadObject, read_object, seal, write_object
from vllm_overlay.tiers.disk.files.root import choose_root, takes_direct_io
from vllm_overlay.tiers.disk.files.writer import Life, path_of, share_life
from vllm_overlay.tiers.disk.messages import DiskPart
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.staging import Staging, staging_size
from vllm_overlay.tiers.disk.thread_pool import ThreadPool
from vllm_overlay.tiers.memory import PAGE_BYTES, Bytes, HostBuffer

MAX_PENDING_STORES = 256
"""Of those that take no staging memory, which bounds all others."""
_JOIN_S = 1.0
_FAULTS = frozenset({Reason.IO_ERROR, Reason.NO_SPACE, Reason.ERROR})
"""Reasons that speak of the disk, not of one object. Many in a row open a breaker."""
_log = RateLimitedLog(logging.getLogger(__name__))


@dataclass(slots=True, eq=False)
class _Fetch:
    """One object of a load, from ``begin_load`` to ``end_fetch``. Guarded by the worker's lock."""

    load_id: str
    position: int
    ticket: LoadTicket
    started: float
    buffer: HostBuffer | None = None
    is_reading: bool = False
    is_wanted: bool = True


@dataclass(slots=True, eq=False)
class _Load:
    """The fetches of a load that have not ended, by position. Guarded by the worker's lock.

    ``bad`` is said once all files have been read (``num_unread`` is 0): one load finds all that is wrong with a prompt.
    """

    fetches: dict[int, _Fetch]
    num_unread: int
    bad: list[FetchResult] = field(default_factory=list)


class DiskTierWorker(TierWorker):
    """See ``TierWorker``. One a rank. Its lock is held for arithmetic only, never over a system call on a file.

    ``unit_bytes`` cuts the staging memory; a multiple of 4 KiB allows O_DIRECT. ``max_object_bytes`` is the largest
    object in one rank. Raises ConfigError when the root or ``staging_bytes`` cannot work.
    """

    def __init__(
        self,
        settings: DiskTierSettings,
        namespace: DiskNamespace,
        rank: int,
        world_size: int,
        unit_bytes: int,
        max_object_bytes: int,
        device: Device | None = None,
    ) -> None:
        make_room_for_descriptors()
        self._device = device or Device()
        self._integrity = integrity_of(settings.encryption_key_file)
        root = choose_root(self._device, settings.root, settings.host_name)
        self._root = root.path
        self._namespace, self._rank, self._world_size = namespace, rank, world_size
        self._staging = Staging(staging_size(settings.staging_bytes), unit_bytes, max_object_bytes)
        wants_direct = settings.direct_io == "auto" and unit_bytes % PAGE_BYTES == 0
        self._direct = wants_direct and takes_direct_io(self._device, root)
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._num_writing = 0
        self._life: Life | None = None
        self._life_lock = threading.Lock()
        """Of write threads alone: who has it may wait for the disk."""
        self._stored: list[StoreResult] = []
        self._loads: dict[str, _Load] = {}
        self._waiting: deque[_Fetch] = deque()
        self._fetched: list[FetchResult] = []
        self._reading: set[_Fetch] = set()
        """Those that a read thread is at."""
        self._is_closing = self._is_closed = False
        self._write_breaker = CircuitBreaker("disk tier: writes")
        self._read_breaker = CircuitBreaker("disk tier: reads")
        self._num_read_threads = settings.read_threads
        self._readers = ThreadPool(f"disk-read-r{rank}", settings.read_threads)
        self._writers = ThreadPool(f"disk-write-r{rank}", settings.write_threads)

    def host_memory(self) -> Sequence[Bytes]:
        return (self._staging.memory,)

    # Stores.

    def begin_store(self, ticket: StoreTicket) -> HostBuffer | None:
        num_bytes = self.staged_bytes(ticket)
        with self._lock:
            are_too_many = not num_bytes and self._num_writing >= MAX_PENDING_STORES
            if self._is_closing or are_too_many or ticket.planned.num_bytes < 1:
                return None
            return self._staging.for_store(num_bytes)

    def staged_bytes(self, ticket: StoreTicket) -> int:
        """For subclasses: how much staging memory the store takes."""
        return ticket.planned.num_bytes

    def submit_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        with self._lock:
            self._num_writing += 1
        self._writers.submit(partial(self._store, ticket, buffer, time.monotonic()))

    def cancel_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        with self._lock:
            self._staging.end_store(buffer)
            self._start_waiting()

    def _store(self, ticket: StoreTicket, buffer: HostBuffer, started: float) -> None:
        """Runs in a write thread."""
        reason = self._try_to_write(ticket, buffer)
        result = StoreResult(ticket.ticket, ticket.planned.num_bytes, time.monotonic() - started, reason)
        with self._lock:
            self._staging.end_store(buffer)
            self._stored.append(result)
            self._num_writing -= 1
            self._start_waiting()
            self._written.notify_all()

    def sealed(self, ticket: StoreTicket, buffer: HostBuffer) -> tuple[HostBuffer, Seal] | None:
        """For subclasses, in a write thread: where the object's bytes are, and what proves them, or None."""
        return buffer, seal(buffer, self._integrity)

    def _try_to_write(self, ticket: StoreTicket, buffer: HostBuffer) -> Reason | None:
        """The reason why not, or None."""
        if self._is_closed or not self._write_breaker.allows():
            return Reason.CLOSED if self._is_closed else Reason.BREAKER
        reason = None
        try:
            part: DiskPart = ticket.part
            self._take_part(part.file.writer)
            path = path_of(self._root, part.file, self._rank)
            planned = self._namespace.stored(ticket.planned)
            header = ObjectHeader(
                bytes.fromhex(part.fingerprint), planned.object_id, planned.parents, planned.start_tokens,
                planned.end_tokens, planned.num_bytes, self._rank, self._world_size, part.file, part.is_private,
            )  # fmt: skip
            if (found := self.sealed(ticket, buffer)) is None:
                reason = Reason.NOT_REPORTED
            else:
                there, proof = found
                write_object(self._device, path, header.sealed(proof), there, self._direct, self._integrity)
        except SHUTDOWN:
            raise
        except OSError as error:
            reason = Reason.NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else Reason.IO_ERROR
            _log.warning(reason, "disk tier: a store was dropped: %s", error)
        except BaseException as error:
            reason = Reason.ERROR
            _log.warning(reason, "disk tier: a store was dropped: %r", error)
        self._write_breaker.report(reason in _FAULTS)
        return reason

    def _take_part(self, writer: str) -> None:
        """So that nobody buries the writer while this rank writes. Raises OSError when it is dead already."""
        with self._life_lock:
            if self._life is None or self._life.writer != writer:
                if (life := share_life(self._root, writer)) is None:
                    raise FileNotFoundError(errno.ENOENT, "the writer of this store has ended", writer)
                if self._life is not None:
                    self._life.end()
                self._life = life

    # Loads.

    def begin_load(self, load_id: str, tickets: Sequence[LoadTicket]) -> None:
        now = time.monotonic()
        fetches = [_Fetch(load_id, position, ticket, now) for position, ticket in enumerate(tickets)]
        with self._lock:
            self._forget_load(load_id)
            self._loads[load_id] = _Load({fetch.position: fetch for fetch in fetches}, len(fetches))
            if self._pause_s():  # threads that hang would not come to say so
                for fetch in fetches:
                    self._end_read(fetch, BadObject(Reason.BREAKER, is_bad=False))
                return
            self._waiting.extend(fetches)
            self._start_waiting()

    def end_fetch(self, load_id: str, position: int) -> None:
        with self._lock:
            load = self._loads.get(load_id)
            if load is not None and (fetch := load.fetches.get(position)) is not None:
                self._forget(fetch)
                self._start_waiting()

    def cancel_load(self, load_id: str) -> None:
        with self._lock:
            self._forget_load(load_id)
            self._start_waiting()

    def load_was_late(self, load_id: str) -> None:
        self._read_breaker.trip()

    def load_pause_s(self) -> float:
        with self._lock:
            return self._pause_s()

    def _pause_s(self) -> float:
        """A pause is not over while all read threads hang in what nobody waits for any more: the next load would wait
        behind them as long as the last one did. Called with the lock held."""
        pause_s, threads = self._read_breaker.pause_left_s(), self._reading
        if not pause_s and self._read_breaker.is_open and len(threads) == self._num_read_threads:
            return 0.0 if any(fetch.is_wanted for fetch in threads) else FIRST_PAUSE_S
        return pause_s

    def _forget_load(self, load_id: str) -> None:
        if (load := self._loads.get(load_id)) is not None:
            for fetch in list(load.fetches.values()):
                self._forget(fetch)
        self._fetched = [result for result in self._fetched if result.load_id != load_id]

    def _forget(self, fetch: _Fetch) -> None:
        """No result of the fetch goes out any more. Its buffer is free, at once or when its thread is done with it."""
        fetch.is_wanted = False
        load = self._loads[fetch.load_id]
        del load.fetches[fetch.position]
        if not load.fetches:
            del self._loads[fetch.load_id]
        self._free(fetch)

    def _free(self, fetch: _Fetch) -> None:
        if fetch.buffer is not None and not fetch.is_reading:
            self._staging.end_load(fetch.buffer)
            fetch.buffer = None

    def _start_waiting(self) -> None:
        """Hand fetches to the read threads, in order, as far as the staging memory goes. Called with the lock held."""
        while self._waiting:
            fetch = self._waiting[0]
            if not fetch.is_wanted:
                self._waiting.popleft()
            elif self._is_closed:
                self._end_read(self._waiting.popleft(), BadObject(Reason.CLOSED, is_bad=False))
            elif fetch.ticket.num_bytes > self._staging.max_object_bytes:
                self._end_read(self._waiting.popleft(), BadObject(Reason.TOO_LARGE, is_bad=False))
            elif (buffer := self._staging.for_load(fetch.ticket.num_bytes)) is not None:
                fetch.buffer, fetch.is_reading = buffer, True
                self._readers.submit(partial(self._fetch, self._waiting.popleft(), buffer))
            else:
                return

    def _fetch(self, fetch: _Fetch, buffer: HostBuffer) -> None:
        """Runs in a read thread."""
        with self._lock:
            self._reading.add(fetch)
        failure = self._try_to_read(fetch, buffer)
        with self._lock:
            self._reading.discard(fetch)
            fetch.is_reading = False
            if fetch.is_wanted:
                self._end_read(fetch, failure)
            else:
                self._free(fetch)
            self._start_waiting()

    def _end_read(self, fetch: _Fetch, failure: BadObject | None) -> None:
        """What came of a fetch that is wanted. Called with the lock held."""
        load = self._loads[fetch.load_id]
        load.num_unread -= 1
        if failure is None:
            self._fetched.append(self._result(fetch))
        else:
            self._forget(fetch)
            load.bad.append(self._result(fetch, failure))
        if not load.num_unread or (failure is not None and not failure.is_bad):
            self._fetched += load.bad
            load.bad = []

    def take(self, load_id: str, position: int, begin: int, part: memoryview) -> None:
        """For subclasses, in a read thread: see ``read_object``."""

    def _try_to_read(self, fetch: _Fetch, buffer: HostBuffer) -> BadObject | None:
        """The reason why not, or None."""
        if not fetch.is_wanted or self._is_closed:
            return BadObject(Reason.CLOSED, is_bad=False)
        if not self._read_breaker.allows():
            return BadObject(Reason.BREAKER, is_bad=False)
        failure = self._read(fetch, buffer)
        self._read_breaker.report(failure is not None and failure.reason in _FAULTS)
        return failure

    def _read(self, fetch: _Fetch, buffer: HostBuffer) -> BadObject | None:
        ticket = fetch.ticket
        part: DiskPart = ticket.part
        path = path_of(self._root, part.file, self._rank)
        try:
            stored_id = self._namespace.stored_id(ticket.object_id)
            fingerprint = bytes.fromhex(part.fingerprint)
            identity = Identity(fingerprint, stored_id, part.file, self._rank, self._world_size, ticket.num_bytes)
            read_object(
                self._device, path, identity, buffer, self._direct, self._integrity, lambda: fetch.is_wanted,
                partial(self.take, fetch.load_id, fetch.position),
            )  # fmt: skip
        except BadObject as bad:
            if fetch.is_wanted:
                _log.warning(bad.reason, "disk tier: an object was not loaded (%s): %s", bad.reason, path)
            return bad
        except SHUTDOWN:
            raise
        except BaseException as error:
            _log.warning("error", "disk tier: an object was not loaded: %r", error)
            return BadObject(Reason.ERROR, is_bad=False)
        return None

    def _result(self, fetch: _Fetch, failure: BadObject | None = None) -> FetchResult:
        return FetchResult(
            load_id=fetch.load_id,
            position=fetch.position,
            object_id=fetch.ticket.object_id,
            num_bytes=fetch.ticket.num_bytes,
            seconds=time.monotonic() - fetch.started,
            buffer=fetch.buffer,
            reason=None if failure is None else failure.reason,
            is_bad=failure is not None and failure.is_bad,
            is_unreadable=failure is not None and failure.is_unreadable,
        )

    # Both.

    def poll(self) -> tuple[list[StoreResult], list[FetchResult]]:
        with self._lock:
            stored, self._stored = self._stored, []
            fetched, self._fetched = self._fetched, []
        return stored, fetched

    def pending_stores(self) -> int:
        with self._lock:
            return self._num_writing + len(self._stored)

    def close(self, timeout_s: float) -> int:
        with self._lock:
            self._is_closing = True
            self._written.wait_for(lambda: not self._num_writing, timeout_s)
            given_up = self._num_writing
            self._is_closed = True
            self._start_waiting()
        self._readers.stop(_JOIN_S)
        self._writers.stop(_JOIN_S)
        if self._life is not None and not self._num_writing:
            self._life.end()
        return given_up
