# SPDX-License-Identifier: Apache-2.0
"""What the disk tier's tests share: both halves on one root, and prompts' worth of objects."""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vllm_overlay.config import DiskTierSettings, tier_settings
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import FetchResult, LoadTicket, StoreResult
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.format import file_bytes
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.namespace import DiskNamespace
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import HostBuffer

UNIT = 8192
OBJECT = 3 * UNIT - 1000
NAMESPACE = DiskNamespace("a" * 64, "b" * 64, {"model": "tiny"})
OTHER_NAMESPACE = DiskNamespace("c" * 64, "d" * 64, {"model": "another"})


def until(predicate: Callable[[], object], what: str = "the condition", deadline_s: float = 20.0) -> None:
    """Wait for something that other threads do; the deadline is for tests that fail."""
    end = time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.002)


def settings(root: Path, **changes: object) -> DiskTierSettings:
    made = tier_settings({"tier": "disk", "root": str(root), "staging_bytes": 40 * UNIT, "min_free_bytes": 0} | changes)
    assert isinstance(made, DiskTierSettings)
    return made


def key(*words: object) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


def chain(name: str, length: int, num_bytes: int = OBJECT) -> list[PlannedObject]:
    """A prompt's chunks with a snapshot on the last one, parents first."""
    ids = [ObjectId("f0", key(name, place)) for place in range(length)]
    chunks = [
        PlannedObject(object_id, tuple(ids[max(0, place - 1) : place]), place * 64, place * 64 + 64, num_bytes, 0)
        for place, object_id in enumerate(ids)
    ]
    end = length * 64
    return [*chunks, PlannedObject(ObjectId("s", key(name, "state")), (ids[-1],), end, end, num_bytes)]


def content(planned: PlannedObject, rank: int) -> np.ndarray:
    """The bytes that stand for an object in one rank."""
    seed = int.from_bytes(key(planned.object_id, rank)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, planned.num_bytes, dtype=np.uint8)


def fill(buffer: HostBuffer, data: np.ndarray) -> None:
    done = 0
    for segment in buffer.segments():
        segment[:] = data[done : done + segment.size]
        done += segment.size


def bytes_of(buffer: HostBuffer) -> np.ndarray:
    return np.concatenate(buffer.segments())


class FailingDevice(Device):
    """A device on which ``faults`` names the calls that raise, and the error they raise."""

    def __init__(self, **faults: int) -> None:
        self.faults = dict(faults)

    def _fail(self, call: str) -> None:
        if call in self.faults:
            raise OSError(self.faults[call], os.strerror(self.faults[call]))

    def preadv(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._fail("preadv")
        return super().preadv(fd, segments, offset)

    def pwritev(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._fail("pwritev")
        return super().pwritev(fd, segments, offset)

    def rename(self, source: str, target: str) -> None:
        self._fail("rename")
        super().rename(source, target)

    def open(self, path: str, flags: int) -> int:
        self._fail("open")
        return super().open(path, flags)

    def unlink(self, path: str) -> None:
        self._fail("unlink")
        super().unlink(path)


class ShortDevice(Device):
    """Moves at most a page a call, as a kernel may."""

    def preadv(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().preadv(fd, [segments[0][:4096]], offset)

    def pwritev(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().pwritev(fd, [segments[0][:4096]], offset)


class Engine:
    """One tier and its ranks' workers, driven by hand as the connector does."""

    def __init__(
        self,
        root: Path,
        world_size: int = 1,
        namespace: DiskNamespace = NAMESPACE,
        device: Device | None = None,
        unit_bytes: int = UNIT,
        max_object_bytes: int = OBJECT,
        **changes: object,
    ) -> None:
        self.root, self.world_size, self.namespace = root, world_size, namespace
        made = settings(root, **changes)
        self.tier = DiskTierManager(made, namespace, world_size, max_object_bytes, device)
        self.workers = [
            DiskTierWorker(made, namespace, rank, world_size, unit_bytes, max_object_bytes, device)
            for rank in range(world_size)
        ]
        self._loads = 0

    def recovered(self) -> "Engine":
        until(lambda: self.tier.advance() or not self.tier.is_recovering, "recovery")
        self.tier.index.check_integrity()
        return self

    def try_store(self, planned: PlannedObject) -> str:
        """Empty when stored, else why not."""
        self.tier.advance()
        ticket = self.tier.reserve(planned)
        if ticket is None:
            return "no_room"
        results: list[StoreResult] = []
        for rank, worker in enumerate(self.workers):
            buffer = worker.begin_store(ticket)
            assert buffer is not None
            fill(buffer, content(planned, rank))
            worker.submit_store(ticket, buffer)
        for worker in self.workers:
            mine: list[StoreResult] = []
            until(lambda worker=worker, mine=mine: mine.extend(worker.poll()[0]) or mine, "a store's result")
            results += mine
        failed = [result.reason for result in results if result.reason]
        (self.tier.abort if failed else self.tier.commit)(ticket.ticket)
        return failed[0] if failed else ""

    def outcome(self, planned: PlannedObject) -> str:
        """Empty when stored, else why not; waits for room."""
        reasons = ["no_room"]
        until(lambda: reasons.append(self.try_store(planned)) or reasons[-1] != "no_room", "room")
        return reasons[-1]

    def store(self, objects: list[PlannedObject]) -> None:
        """Store all; waits for room."""
        for planned in objects:
            assert self.outcome(planned) == ""
        self.tier.index.check_integrity()

    def store_at_last(self, planned: PlannedObject) -> None:
        """Store it however often that fails before."""
        until(lambda: self.try_store(planned) == "", "a store that succeeds")

    def fetch(self, objects: list[PlannedObject], rank: int = 0) -> list[FetchResult]:
        """Ask a worker for objects, whatever the index says, and end each fetch. Checks the bytes."""
        self._loads += 1
        load_id = f"load-{self._loads}"
        worker = self.workers[rank]
        worker.begin_load(load_id, [LoadTicket(0, planned.object_id, planned.num_bytes) for planned in objects])
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

    def spares(self) -> list[Path]:
        """Files that wait to be written over."""
        return sorted(Path(path) for spare in self.tier._reclaimer._lease.spares() for path in spare.paths)

    def reasons(self, objects: list[PlannedObject], rank: int = 0) -> list[str]:
        return [result.reason or "" for result in self.fetch(objects, rank)]

    def path(self, planned: PlannedObject, rank: int = 0) -> Path:
        return Path(self.namespace.path_of(str(self.root), planned.object_id, rank))

    def has(self, planned: PlannedObject) -> bool:
        return self.tier.index.has(planned.object_id)

    def coverage(self, objects: list[PlannedObject]) -> list[bool]:
        return [self.has(planned) for planned in objects]

    def close(self, timeout_s: float = 4.0) -> int:
        given_up = sum(worker.close(timeout_s) for worker in self.workers)
        self.tier.close()
        self.tier.index.check_integrity()
        return given_up


@contextmanager
def engine(root: Path, **changes: object) -> Iterator[Engine]:
    made = Engine(root, **changes)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def _files_under(root: Path) -> Iterator[Path]:
    """Files in the places of objects, while others may remove files and directories."""
    for directory, _, names in os.walk(root):
        if len(Path(directory).relative_to(root).parts) == 2:
            yield from (Path(directory, name) for name in names)


def object_files(root: Path) -> list[Path]:
    return sorted(path for path in _files_under(root) if not path.name.startswith(".tmp."))


def bytes_of_objects(root: Path) -> int:
    """What the ledger counts, while nobody writes or removes any."""
    return sum(path.stat().st_size for path in object_files(root))


def temporaries(root: Path) -> list[Path]:
    walk = ((directory, name) for directory, _, names in os.walk(root) for name in names)
    return sorted(Path(directory, name) for directory, name in walk if name.startswith(".tmp."))


def bytes_under(root: Path) -> int:
    """Bytes of all objects and temporaries that were there at one moment, while others may write and remove them: one
    walk alone would count what goes behind it and what comes before it. What two walks see was there between them."""
    first, second = _sizes_under(root), _sizes_under(root)
    return sum(min(size, second[file]) for file, size in first.items() if file in second)


def _sizes_under(root: Path) -> dict[tuple[int, int], int]:
    """By inode (a rename keeps it) and time of the last write (an inode's number is used again)."""
    sizes = {}
    for path in _files_under(root):
        try:
            status = path.lstat()
        except OSError as error:
            assert error.errno == errno.ENOENT
        else:
            sizes[status.st_ino, status.st_mtime_ns] = status.st_size
    return sizes


def on_disk(num_bytes: int = OBJECT) -> int:
    return file_bytes(num_bytes)
