# SPDX-License-Identifier: Apache-2.0
"""Stores and loads that the workers still have to report.

A copy that is under way cannot be taken back. So its memory and its blocks are taken until it has ended. A report that
is overdue is waited for no longer, but what it stands for stays taken until it comes. It also ends when every rank has
said, in one and the same step, that it holds nothing of it: then the report was lost.
"""

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.tiers.base import LoadTicket, StoreTicket


class PendingStore(msgspec.Struct, gc=False):
    """A store ticket that is out: reports still to come, one a rank."""

    ticket: int
    request_id: str
    planned: PlannedObject
    deadline: float
    missing_reports: int
    has_failed: bool = False
    is_overdue: bool = False


@dataclass(slots=True)
class PendingLoad:
    """A load that workers still have to report, and what it keeps pinned."""

    request_id: str
    tickets: tuple[LoadTicket, ...]
    deadline: float
    has_failed: bool = False
    is_overdue: bool = False


class PendingReports:
    """Called by the scheduler's half alone. ``timeout_s`` is the setting ``report_timeout_s``."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._stores: dict[int, PendingStore] = {}
        """In the order in which they went out, and so in that of their deadlines."""
        self._loads: dict[str, PendingLoad] = {}
        self._has_overdue = False

    def __bool__(self) -> bool:
        return bool(self._stores or self._loads)

    @property
    def num_stores(self) -> int:
        return len(self._stores)

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    @property
    def are_awaited(self) -> bool:
        """Whether a report that is not overdue is still to come."""
        return any(not store.is_overdue for store in self._stores.values()) or any(
            not load.is_overdue for load in self._loads.values()
        )

    def add_stores(self, request_id: str, tickets: Iterable[StoreTicket]) -> None:
        """These tickets of one request go out now."""
        deadline = time.monotonic() + self._timeout_s
        for ticket in tickets:
            number = ticket.ticket
            self._stores[number] = PendingStore(number, request_id, ticket.planned, deadline, self._world_size)

    def add_load(self, request_id: str, tickets: tuple[LoadTicket, ...]) -> None:
        self._loads[request_id] = PendingLoad(request_id, tickets, time.monotonic() + self._timeout_s)

    def take_back(self, num_before: int) -> list[int]:
        """Stores that went out after the first ``num_before``, which no worker will hear of: forgets them and returns
        their tickets."""
        tickets = list(self._stores)[num_before:]
        for ticket in tickets:
            del self._stores[ticket]
        return tickets

    def report_stores(self, reported: Counter[int], failed: Collection[int]) -> list[PendingStore]:
        """Takes in a step's reports by ticket; returns the stores that every rank has reported now."""
        ended = []
        for ticket, num_ranks in reported.items():
            if (store := self._stores.get(ticket)) is None:
                continue
            store.missing_reports -= num_ranks
            store.has_failed |= ticket in failed
            if store.missing_reports <= 0:
                ended.append(self._stores.pop(ticket))
        return ended

    def fail_all_stores(self) -> int:
        """Mark every store that is out as failed. Returns how many were not marked before."""
        sound = [store for store in self._stores.values() if not store.has_failed]
        for store in sound:
            store.has_failed = True
        return len(sound)

    def fail_load(self, request_id: str) -> bool:
        """A rank says that the load of a request has failed. Whether that is news: no rank has said so before."""
        load = self._loads.get(request_id)
        if load is None:
            return True
        is_news, load.has_failed = not load.has_failed, True
        return is_news

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._loads

    def overdue(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Tickets of stores, and ids of requests with a load."""
        if not self._has_overdue:
            return (), ()
        stores = tuple(store.ticket for store in self._stores.values() if store.is_overdue)
        loads = tuple(load.request_id for load in self._loads.values() if load.is_overdue)
        self._has_overdue = bool(stores or loads)
        return stores, loads

    def take_lost(self, idle_stores: Counter[int], idle_loads: Counter[str]) -> tuple[list[PendingStore], list[str]]:
        """Stores (failed now) and requests with loads of which no rank holds anything. ``end_load`` ends the loads.

        The answer to an earlier question may come late: the load has ended, and another one of its request has begun.
        That one is not overdue.
        """
        stores = [
            self._stores.pop(ticket)
            for ticket, num_ranks in idle_stores.items()
            if num_ranks == self._world_size and ticket in self._stores
        ]
        for store in stores:
            store.has_failed = True
        loads = [
            request_id
            for request_id, num_ranks in idle_loads.items()
            if num_ranks == self._world_size and request_id in self._loads and self._loads[request_id].is_overdue
        ]
        return stores, loads

    def end_load(self, request_id: str) -> tuple[LoadTicket, ...]:
        """All ranks have reported the load; returns the tickets of what it kept pinned."""
        load = self._loads.pop(request_id, None)
        return () if load is None else load.tickets

    def take_overdue(self) -> tuple[list[PendingStore], list[PendingLoad]]:
        """Stores and loads that have become overdue since the last call."""
        if not self:
            return [], []
        now = time.monotonic()
        late = itertools.takewhile(lambda store: store.deadline < now, self._stores.values())
        stores = [store for store in late if not store.is_overdue]
        loads = [load for load in self._loads.values() if load.deadline < now and not load.is_overdue]
        for store in stores:
            store.is_overdue = self._has_overdue = True
        for load in loads:
            load.is_overdue = self._has_overdue = True
        return stores, loads
