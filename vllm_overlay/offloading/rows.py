# SPDX-License-Identifier: Apache-2.0
"""The byte half of a secondary tier: between vLLM's rows in host memory and verified files."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import Bytes, HostBuffer

Fetched = tuple[str, int]
"""A load, and the position of one of its tickets."""


class RowWorker(DiskTierWorker):
    """A DiskTierWorker whose threads copy between its staging memory and rows that vLLM has lent.

    A row is lent until its store or fetch has ended, or ``take_back``. A thread that hangs in a system call holds
    staging memory and never a row. So vLLM may use the row again, whatever the disk does.
    """

    def __init__(self, rows: Bytes, *args: Any, **kwargs: Any) -> None:
        """``rows``: (rows, bytes a row). The rest is DiskTierWorker's."""
        super().__init__(*args, **kwargs)
        self._rows = rows
        self._lent = threading.Condition()
        self._row_of: dict[int | Fetched, int] = {}
        """By the ticket of a store, or by what a load fetches."""
        self._num_copying = 0

    def lend(self, borrower: int | Fetched, row: int) -> None:
        """Before ``submit_store`` or ``begin_load``."""
        with self._lent:
            self._row_of[borrower] = row

    def take_back(self, borrowers: Iterable[int | Fetched]) -> None:
        """After this, nothing touches their rows. Waits for copies in memory alone."""
        with self._lent:
            for borrower in borrowers:
                self._row_of.pop(borrower, None)
            self._lent.wait_for(lambda: not self._num_copying)

    def return_rows(self) -> None:
        """After ``close``: vLLM frees the memory, which it cannot while somebody has a view of it."""
        self.take_back(list(self._row_of))
        self._rows = self._rows[:0].copy()

    def _copy(self, borrower: int | Fetched, buffer: HostBuffer, *, to_row: bool) -> bool:
        """Whether the row was still lent, and is copied."""
        with self._lent:
            row = self._row_of.pop(borrower, None)
            if row is None:
                return False
            self._num_copying += 1
        try:
            self._copy_row(self._rows[row], buffer, to_row=to_row)
        finally:
            with self._lent:
                self._num_copying -= 1
                self._lent.notify_all()
        return True

    def _copy_row(self, row: Bytes, buffer: HostBuffer, *, to_row: bool) -> None:
        begin = 0
        for segment in buffer.segments():
            part = row[begin : begin + segment.size]
            np.copyto(*((part, segment) if to_row else (segment, part)))
            begin += segment.size

    def fill(self, ticket: StoreTicket, buffer: HostBuffer) -> bool:
        return self._copy(ticket.ticket, buffer, to_row=False)

    def take(self, load_id: str, position: int, buffer: HostBuffer) -> bool:
        return self._copy((load_id, position), buffer, to_row=True)
