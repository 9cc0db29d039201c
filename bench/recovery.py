# SPDX-License-Identifier: Apache-2.0
"""The disk tier's scan at start, beside reading the same headers and nothing else (docs/benchmarks.md)."""

import argparse
import hashlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import Subject, table, take_turns
from vllm_overlay.config import GIB
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.files.scan import scan_objects
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import unit_size

_NAMESPACE = DiskNamespace("a" * 64, "b" * 64, {"model": "a measurement"})
_OBJECT_BYTES = 4096
_HEADER_BYTES = 4096
_PROMPT_CHUNKS = 100
_STEP_S = 0.005


def prompts(num_objects: int) -> Iterator[PlannedObject]:
    """Chains of ``_PROMPT_CHUNKS`` chunks, parents first."""
    parents: tuple[ObjectId, ...] = ()
    for number in range(num_objects):
        place = number % _PROMPT_CHUNKS
        object_id = ObjectId("f0", hashlib.sha256(number.to_bytes(8, "little")).digest())
        yield PlannedObject(object_id, parents if place else (), place * 64, place * 64 + 64, _OBJECT_BYTES, 0)
        parents = (object_id,)


def fill(settings: DiskTierSettings, num_objects: int) -> None:
    """Stores the objects as the connector would."""
    tier = DiskTierManager(settings, _NAMESPACE, 1, _OBJECT_BYTES)
    worker = DiskTierWorker(settings, _NAMESPACE, 0, 1, unit_size(_OBJECT_BYTES), _OBJECT_BYTES)
    pending = 0

    def poll() -> int:
        stored, _ = worker.poll()
        for result in stored:
            if result.reason:
                raise RuntimeError(f"a store failed: {result.reason}")
            tier.commit(result.ticket)
        tier.advance()
        return len(stored)

    for planned in prompts(num_objects):
        while (ticket := tier.reserve(planned)) is None:
            pending -= poll()
            time.sleep(0.0002)
        while (buffer := worker.begin_store(ticket)) is None:
            pending -= poll()
            time.sleep(0.0002)
        worker.submit_store(ticket, buffer)
        pending += 1
    while pending:
        pending -= poll()
        time.sleep(0.0002)
    worker.close(60.0)
    tier.close()


@dataclass
class Start:
    """A tier that starts on a full root while its scheduler steps and looks prompts up."""

    settings: DiskTierSettings
    num_objects: int
    longest_step_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        tier = DiskTierManager(self.settings, _NAMESPACE, 1, _OBJECT_BYTES)
        longest = 0.0
        while tier.is_recovering:
            began = time.perf_counter()
            tier.advance()
            longest = max(longest, time.perf_counter() - began)
            time.sleep(_STEP_S)
        if (found := tier.usage().num_objects) != self.num_objects:
            raise RuntimeError(f"{found} of {self.num_objects} objects were found")
        self.longest_step_s.append(longest)
        tier.close()


def read_headers(root: Path) -> None:
    """What no scan can do without: each file's name and first page, one thread."""
    for fingerprint in _NAMESPACE.fingerprints:
        for file in scan_objects(str(root), fingerprint):
            descriptor = os.open(file.path, os.O_RDONLY)
            os.pread(descriptor, _HEADER_BYTES, 0)
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=100_000, help="default: %(default)s, 0.8 GB on disk")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s, after one that does not count")
    parser.add_argument("--directory", type=Path, default=Path(".benchmarks"), help="default: %(default)s")
    arguments = parser.parse_args()
    logging.getLogger("vllm_overlay").setLevel(logging.ERROR)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        root = Path(scratch) / "root"
        settings = DiskTierSettings(root=str(root), capacity_bytes=64 * GIB, min_free_bytes=0)
        print(f"storing {arguments.objects} objects ...", flush=True)
        fill(settings, arguments.objects)
        os.sync()
        start = Start(settings, arguments.objects)
        num_bytes = arguments.objects * _HEADER_BYTES
        ours = Subject("start", num_bytes, start.run)
        headers = Subject("headers", num_bytes, lambda: read_headers(root))
        take_turns([[ours], [headers]], arguments.rounds)
    row = (
        f"{arguments.objects:,}",
        f"{statistics.median(ours.seconds):.1f}",
        f"{statistics.median(headers.seconds):.1f}",
        f"{1 / ours.share_of(headers):.1f}",
        f"{1000 * statistics.median(start.longest_step_s[1:]):.0f}",
    )
    print(table(("objects", "start, s", "headers alone, s", "ratio", "longest step meanwhile, ms"), [row]))


if __name__ == "__main__":
    main()
