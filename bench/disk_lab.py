# SPDX-License-Identifier: Apache-2.0
"""What measurements of tiers share: a namespace, prompts, both halves, who drives them, and a place to work in."""

import argparse
import contextlib
import hashlib
import itertools
import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import LoadTicket, StoreTicket, TierManager, TierWorker
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import unit_size
from vllm_overlay.transfer.base import KVTransfer, Placement

NAMESPACE = DiskNamespace("a" * 64, "b" * 64, {"model": "a measurement"})
CHUNK_TOKENS = 64
_POLL_S = 0.0001


def prompts(num_bytes: int, num_chunks: int = 100, part: int = 0) -> Iterator[PlannedObject]:
    """Chains of ``num_chunks`` chunks of ``num_bytes`` each, parents first, for ever.

    No two parts have a name in common.
    """
    parents: tuple[ObjectId, ...] = ()
    for number in itertools.count():
        place = number % num_chunks
        start = place * CHUNK_TOKENS
        object_id = ObjectId("f0", hashlib.sha256(b"%d %d" % (part, number)).digest())
        yield PlannedObject(object_id, parents if place else (), start, start + CHUNK_TOKENS, num_bytes, 0)
        parents = (object_id,)


def halves(settings: DiskTierSettings, object_bytes: int) -> tuple[DiskTierManager, DiskTierWorker]:
    """Of a tier for one rank and objects of one size."""
    manager = DiskTierManager(settings, NAMESPACE, 1, object_bytes)
    return manager, DiskTierWorker(settings, NAMESPACE, 0, 1, unit_size(object_bytes), object_bytes)


def reserve(tier: TierManager, objects: Iterable[PlannedObject]) -> list[StoreTicket]:
    """Tickets for all objects. Waits until the tier has room, which a scheduler has ahead of its stores."""
    tickets = []
    for planned in objects:
        while (ticket := tier.reserve(planned)) is None:
            tier.advance()
            time.sleep(_POLL_S)
        tickets.append(ticket)
    return tickets


def load_tickets(stores: Iterable[StoreTicket]) -> list[LoadTicket]:
    """For the worker that has stored them, whether or not the scheduler's half counts them as stored."""
    return [LoadTicket(one.ticket, one.planned.object_id, one.planned.num_bytes, one.part) for one in stores]


class Driver:
    """Stores and loads as the connector's worker does, and waits where that would drop a store.

    Without a transfer nothing is copied to and from a KV cache, and placements are not asked for.
    """

    def __init__(self, worker: TierWorker, transfer: KVTransfer | None = None) -> None:
        self._worker = worker
        self._transfer = transfer
        self._load_ids = itertools.count()

    def store(self, tickets: Sequence[StoreTicket], placements: Sequence[Placement] = ()) -> None:
        """Returns when all are stored."""
        left, num_stored = deque(range(len(tickets))), 0
        while num_stored < len(tickets):
            accepted = []
            while left and (buffer := self._worker.begin_store(tickets[left[0]])) is not None:
                accepted.append((left.popleft(), buffer))
            if self._transfer is not None:
                self._transfer.gather([placements[place] for place, _ in accepted], [buffer for _, buffer in accepted])
                self._check_copies(self._transfer)
            for place, buffer in accepted:
                self._worker.submit_store(tickets[place], buffer)
            stored, _ = self._worker.poll()
            for result in stored:
                if result.reason:
                    raise RuntimeError(f"a store failed: {result.reason}")
            num_stored += len(stored)
            if not stored:
                time.sleep(_POLL_S)

    def load(self, tickets: Sequence[LoadTicket], placements: Sequence[Placement] = ()) -> None:
        """Returns when all are in the KV cache."""
        load_id, num_loaded = str(next(self._load_ids)), 0
        self._worker.begin_load(load_id, tickets)
        while num_loaded < len(tickets):
            _, fetched = self._worker.poll()
            fetched.sort(key=lambda result: result.position)
            buffers = []
            for result in fetched:
                if result.buffer is None:
                    raise RuntimeError(f"a load failed: {result.reason}")
                buffers.append(result.buffer)
            if self._transfer is not None:
                self._transfer.scatter([placements[result.position] for result in fetched], buffers)
                self._check_copies(self._transfer)
            for result in fetched:
                self._worker.end_fetch(load_id, result.position)
            num_loaded += len(fetched)
            if not fetched:
                time.sleep(_POLL_S)

    def _check_copies(self, transfer: KVTransfer) -> None:
        """They have ended: the CPU's copies are made when they are submitted."""
        for copy in transfer.poll():
            if copy.error is not None:
                raise RuntimeError("a copy failed") from copy.error


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--directory", type=Path, default=Path(".benchmarks"), help="default: %(default)s")
    return made


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A new directory there, removed at the end. The tier logs errors alone meanwhile."""
    logging.getLogger("vllm_overlay").setLevel(logging.ERROR)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as made:
        yield Path(made)
