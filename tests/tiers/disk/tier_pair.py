# SPDX-License-Identifier: Apache-2.0
"""Both halves of the disk tier on one root."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.tiers.disk.inside import file_of, has_news, is_running, num_turns, room_bytes, wake
from tests.tiers.disk.objects import GEOMETRY, OBJECT, UNIT, bytes_of, chain, content, fill
from tests.tiers.integrity import check_integrity
from tests.waiting import PATIENCE_S, until
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import FetchResult, LoadTicket, StoreTicket
from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.files.checksum import XXH3
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY, DiskNamespace
from vllm_overlay.tiers.disk.files.writer import path_of
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.messages import DiskPart
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.factory import tier_spec

NAMESPACE = DiskNamespace("a" * 64, "b" * 64, {"model": "tiny", INTEGRITY: XXH3.name})
OTHER_NAMESPACE = DiskNamespace("c" * 64, "d" * 64, {"model": "another", INTEGRITY: XXH3.name})


NOWHERE = File("0" * 16, 0)


def settings(root: Path, **changes: object) -> DiskTierSettings:
    """Evicts by last use unless told otherwise: a ranking begins by the clock, and then what goes first is chance."""
    made = tier_spec(
        {
            "tier": "disk",
            "root": str(root),
            "staging_bytes": 40 * UNIT,
            "capacity_bytes": "1 GiB",  # what any machine has free
            "min_free_bytes": 0,
            "eviction_policy": "lru",
            **changes,
        }
    ).settings
    assert isinstance(made, DiskTierSettings)
    return made


class TierPair:
    """One tier and its ranks' workers, driven by hand as the connector does."""

    def __init__(
        self,
        root: Path,
        world_size: int = 1,
        namespace: DiskNamespace = NAMESPACE,
        device: Device | None = None,
        unit_bytes: int = UNIT,
        max_object_bytes: int = OBJECT,
        geometry: Geometry | None = GEOMETRY,
        step_bytes: int = 0,
        **changes: object,
    ) -> None:
        self.root, self.world_size, self.namespace, self.device = root, world_size, namespace, device
        made = settings(root, **changes)
        self.tier = DiskTierManager(made, namespace, world_size, max_object_bytes, device, geometry, step_bytes)
        self.workers = [
            DiskTierWorker(made, namespace, rank, world_size, unit_bytes, max_object_bytes, device)
            for rank in range(world_size)
        ]
        self._loads = 0
        self._files: dict[ObjectId, File] = {}
        """Where each object was written last from here."""

    def recovered(self) -> "TierPair":
        until(lambda: self.tier.advance() or not self.tier.is_recovering, "recovery")
        check_integrity(self.tier.index)
        return self

    def with_room(self) -> "TierPair":
        """A store finds room for any object."""
        until(lambda: self.tier.advance() or room_bytes(self.tier) >= OBJECT, "room")
        return self

    def settled(self) -> "TierPair":
        """Nothing is under way any more, neither here nor in what the catalogue has been told."""
        done = num_turns(self.tier)

        def is_settled() -> bool:
            self.tier.advance()
            if num_turns(self.tier) > done + 1:
                return not has_news(self.tier)
            wake(self.tier)
            return False

        until(is_settled, "an end")
        return self

    def turned(self) -> "TierPair":
        """The bookkeeper has had a whole turn since, whether it could do its work or not."""
        done = num_turns(self.tier)
        until(lambda: wake(self.tier) or num_turns(self.tier) > done + 1, "a turn")
        return self

    def never(self, planned: PlannedObject) -> str:
        """Why the object cannot be stored however long one waits, or empty. What is on its way out makes room."""
        self.tier.advance()
        if self.tier.has_or_awaits(planned.object_id):
            return "there"
        return "" if all(map(self.tier.index.has_or_awaits, planned.parents)) else "no_parent"

    def try_store(self, planned: PlannedObject, data: np.ndarray | None = None) -> str:
        """Empty when stored, else why not."""
        self.tier.advance()
        ticket = self.tier.reserve(planned)
        if ticket is None:
            return "no_room"
        why_not = self.why_not_written(ticket, data)
        (self.tier.abort if why_not else self.tier.commit)(ticket.ticket)
        return why_not

    def write(self, planned: PlannedObject) -> int:
        """Every rank's file, of which the index half is not told; returns the ticket to commit or to abort."""

        def reserve() -> StoreTicket | None:
            assert self.never(planned) == ""
            return self.tier.reserve(planned)

        ticket = until(reserve, "room")
        assert ticket is not None
        assert self.why_not_written(ticket) == ""
        return ticket.ticket

    def submit(self, ticket: StoreTicket, data: np.ndarray | None = None) -> StoreTicket:
        """Every rank begins to write."""
        self._files[ticket.planned.object_id] = ticket.part.file
        for rank, worker in enumerate(self.workers):
            buffer = worker.begin_store(ticket)
            assert buffer is not None
            fill(buffer, content(ticket.planned, rank) if data is None else data)
            worker.submit_store(ticket, buffer)
        return ticket

    def why_not_written(self, ticket: StoreTicket, data: np.ndarray | None = None) -> str:
        """Empty when every rank has written it, else why not."""
        self.submit(ticket, data)
        return self.end_of_store()

    def end_of_store(self) -> str:
        """Waits for the only store that is under way. Empty when every rank has written it, else why not."""
        results = [until(lambda worker=worker: worker.poll()[0], "a store's result")[0] for worker in self.workers]
        return next((str(result.reason) for result in results if result.reason), "")

    def outcome(self, planned: PlannedObject) -> str:
        """Empty when stored, else why not; waits for room, unless it is in vain."""
        reasons: list[str] = []

        def has_ended() -> bool:
            reasons.append(self.never(planned) or self.try_store(planned))
            return reasons[-1] != "no_room"

        until(has_ended, "room")
        return reasons[-1]

    def store(self, objects: list[PlannedObject]) -> None:
        """Store all; waits for room."""
        for planned in objects:
            outcome = self.outcome(planned)
            assert outcome == "", outcome
        check_integrity(self.tier.index)

    def store_at_last(self, planned: PlannedObject, data: np.ndarray | None = None) -> None:
        """Store it however often that fails before; ``data`` for other bytes than ``content``."""
        until(lambda: self.try_store(planned, data) == "", "a store that succeeds")

    def fetch(self, objects: list[PlannedObject], rank: int = 0) -> list[FetchResult]:
        """Ask a worker for objects, whatever the index says, and end each fetch. Checks the bytes."""
        self._loads += 1
        load_id = f"load-{self._loads}"
        worker = self.workers[rank]
        worker.begin_load(load_id, [self.load_ticket(planned) for planned in objects])
        results: dict[int, FetchResult] = {}

        def poll() -> bool:
            for result in worker.poll()[1]:
                assert result.load_id == load_id
                assert result.position not in results
                results[result.position] = result
                if result.buffer is not None:
                    planned = objects[result.position]
                    assert np.array_equal(bytes_of(result.buffer), content(planned, rank))
                    worker.end_fetch(load_id, result.position)
            return len(results) == len(objects)

        until(poll, "a load's results")
        return [results[place] for place in range(len(objects))]

    def reasons(self, objects: list[PlannedObject], rank: int = 0) -> list[str]:
        return [result.reason or "" for result in self.fetch(objects, rank)]

    def file(self, planned: PlannedObject) -> File:
        """Where the object is by the index, else where it was written last from here, else nowhere."""
        own = file_of(self.tier, planned.object_id)
        return own or self._files.get(planned.object_id, NOWHERE)

    def path(self, planned: PlannedObject, rank: int = 0) -> Path:
        return Path(path_of(str(self.root), self.file(planned), rank))

    def pretend(self, planned: PlannedObject, file: File) -> None:
        """Ask for the object there from now on, unless the index has it."""
        self._files[planned.object_id] = file

    def load_ticket(self, planned: PlannedObject) -> LoadTicket:
        """As the manager hands it out before any reset."""
        return LoadTicket(
            0, planned.object_id, planned.num_bytes, DiskPart(self.file(planned), self.namespace.fingerprint)
        )

    def has(self, planned: PlannedObject) -> bool:
        return self.tier.index.has(planned.object_id)

    def coverage(self, objects: list[PlannedObject]) -> list[bool]:
        return [self.has(planned) for planned in objects]

    def close(self, timeout_s: float = PATIENCE_S) -> int:
        given_up = sum(worker.close(timeout_s) for worker in self.workers)
        check_integrity(self.tier.index)
        close_tier(self.tier)
        return given_up


def close_tier(tier: DiskTierManager) -> None:
    """Nothing of it works on the root any more."""
    tier.close()
    until(lambda: not is_running(tier), "the end of its threads")


@contextmanager
def tier_pair(root: Path, **changes: object) -> Iterator[TierPair]:
    made = TierPair(root, **changes)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def store_many(made: TierPair, count: int, watch: Callable[[], object], name: str = "many") -> None:
    """Prompts ``many-0``, ``many-1``, ..., with a look after each. None may be there: it would not be stored again."""
    for turn in range(count):
        made.store(chain(f"{name}-{turn}", 2))
        watch()
