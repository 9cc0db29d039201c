# SPDX-License-Identifier: Apache-2.0
"""The byte half of a secondary tier: between vLLM's rows in host memory and verified files."""

import contextlib
import ctypes
import threading
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from vllm_overlay.common.reasons import Reason
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk.files.checksum import Seal
from vllm_overlay.tiers.disk.files.object_file import BadObject, seal
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import PAGE_BYTES, Bytes, HostBuffer

Fetched = tuple[str, int]
"""A load, and the position of one of its tickets."""


class RowWorker(DiskTierWorker):
    """A DiskTierWorker whose objects are rows that vLLM has lent.

    A row is lent until its store or fetch has ended, or ``take_back``. vLLM may use the row again then, whatever the
    disk does. So what is read goes through staging memory: a read that hangs may still write. What is written goes from
    the row itself. A write that hangs only reads, and what it leaves is not committed, nor would it verify.
    """

    def __init__(self, rows: memoryview, *args: Any, **kwargs: Any) -> None:
        """``rows``: (rows, bytes a row). The rest is DiskTierWorker's."""
        super().__init__(*args, **kwargs)
        self._rows = _not_held(rows)
        is_aligned = not (self._rows.ctypes.data % PAGE_BYTES or self._rows.shape[1] % PAGE_BYTES)
        self._is_staged = bool(self._integrity.salt_bytes) or not is_aligned
        """Stores too: they are encrypted in place, or O_DIRECT does not take the rows."""
        self._staging.memory[:, ::PAGE_BYTES] = 0  # now, and not in the first load: the system has to find the pages
        self._lent = threading.Condition()
        self._row_of: dict[int | Fetched, int] = {}
        """By the ticket of a store, or by what a load fetches."""
        self._touched: set[int | Fetched] = set()
        """Whose rows a thread copies or reads now."""

    def lend(self, borrower: int | Fetched, row: int) -> None:
        """Before ``submit_store`` or ``begin_load``."""
        with self._lent:
            self._row_of[borrower] = row

    def take_back(self, borrowers: Collection[int | Fetched]) -> None:
        """After this, nothing changes their rows or rests on what they hold. Waits for work on them in memory alone."""
        with self._lent:
            for borrower in borrowers:
                self._row_of.pop(borrower, None)
            self._lent.wait_for(lambda: self._touched.isdisjoint(borrowers))

    def return_rows(self) -> None:
        """After ``close``: vLLM unmaps the memory."""
        self.take_back(list(self._row_of))
        self._rows = self._rows[:0].copy()

    def _was_lent(self, borrower: int | Fetched) -> bool:
        """Until now. It is not any more."""
        with self._lent:
            return self._row_of.pop(borrower, None) is not None

    @contextlib.contextmanager
    def _row(self, borrower: int | Fetched) -> Iterator[Bytes | None]:
        """The row, to be touched inside; None if it is not lent any more."""
        with self._lent:
            place = self._row_of.get(borrower)
            if place is not None:
                self._touched.add(borrower)
        try:
            yield None if place is None else self._rows[place]
        finally:
            with self._lent:
                self._touched.discard(borrower)
                self._lent.notify_all()

    # Stores.

    def staged_bytes(self, ticket: StoreTicket) -> int:
        return ticket.planned.num_bytes if self._is_staged else 0

    def sealed(self, ticket: StoreTicket, buffer: HostBuffer) -> tuple[HostBuffer, Seal] | None:
        with self._row(ticket.ticket) as row:
            if row is None:
                return None
            if self._is_staged:
                begin = 0
                for segment in buffer.segments():
                    np.copyto(segment, row[begin : begin + segment.size])
                    begin += segment.size
            else:
                buffer = HostBuffer(row[np.newaxis], (0,), row.size)
            return buffer, seal(buffer, self._integrity)

    def _try_to_write(self, ticket: StoreTicket, buffer: HostBuffer) -> Reason | None:
        reason = super()._try_to_write(ticket, buffer)
        return reason if self._was_lent(ticket.ticket) else Reason.NOT_REPORTED

    # Loads.

    def _forget(self, fetch: Any) -> None:
        super()._forget(fetch)
        self._was_lent((fetch.load_id, fetch.position))

    def take(self, load_id: str, position: int, begin: int, part: memoryview) -> None:
        with self._row((load_id, position)) as row:
            if row is not None:
                np.copyto(row[begin : begin + len(part)], part)

    def _try_to_read(self, fetch: Any, buffer: HostBuffer) -> BadObject | None:
        failure = super()._try_to_read(fetch, buffer)
        if self._was_lent((fetch.load_id, fetch.position)) or failure is not None:
            return failure
        return BadObject(Reason.TIMEOUT, is_bad=False)


def _not_held(rows: memoryview) -> Bytes:
    """The same memory, which vLLM can unmap while a disk holds a thread of ours that has asked to write from it."""
    found = np.frombuffer(rows, dtype=np.uint8)
    memory = (ctypes.c_uint8 * found.size).from_address(found.ctypes.data)
    return np.frombuffer(memory, dtype=np.uint8).reshape(-1, rows.strides[0])
