# SPDX-License-Identifier: Apache-2.0
"""A start of the disk tier on a root with many objects, while its scheduler steps (docs/benchmarks.md)."""

import gc
import multiprocessing
import os
import secrets
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

from bench.disk_lab import NAMESPACE, parser, prompts, scratch
from bench.measure import percentile, table
from vllm_overlay.config import GIB
from vllm_overlay.tiers.disk.catalogue import Catalogue, File, Namespace, StoredObject
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.files.object_file import seal, write_object
from vllm_overlay.tiers.disk.files.root import Root, choose_root
from vllm_overlay.tiers.disk.files.writer import begin_life, path_of
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.memory import HostPool

_OBJECT_BYTES = 4096
_STEP_S = 0.001


def fill(settings: DiskTierSettings, num_objects: int) -> None:
    """Write the objects' files, a page of header and a page of payload each, and no catalogue."""
    root, device, buffer = root_of(settings), Device(), HostPool(1, _OBJECT_BYTES).buffer([0], _OBJECT_BYTES)
    fingerprint = bytes.fromhex(NAMESPACE.fingerprint)
    life = begin_life(root.path, device)
    for number, item in enumerate(islice(prompts(_OBJECT_BYTES), num_objects)):
        file = File(life.writer, number)
        header = ObjectHeader(
            fingerprint, item.object_id, item.parents, item.start_tokens, item.end_tokens, item.num_bytes, 0, 1, file
        )
        header = header.sealed(seal(buffer))
        write_object(device, path_of(root.path, file, 0), header, buffer, direct=False)
    life.end()


def fill_rows(settings: DiskTierSettings, num_objects: int) -> None:
    """Tell a catalogue of objects that have no files: a start with its catalogue reads none."""
    root, writer, now = root_of(settings), secrets.token_hex(8), int(time.time())
    catalogue = Catalogue(root.path, root.journal)
    catalogue.adopt(
        (
            StoredObject(NAMESPACE.fingerprint, item, File(writer, number), 1, file_bytes(item.num_bytes), now)
            for number, item in enumerate(islice(prompts(_OBJECT_BYTES), num_objects))
        ),
        [Namespace(NAMESPACE.fingerprint)],
    )
    catalogue.end_rebuild()
    catalogue.close()


def root_of(settings: DiskTierSettings) -> Root:
    """The directory that the tier chooses, made if it is not there."""
    return choose_root(Device(), settings.root, settings.host_name)


def lose_catalogue(settings: DiskTierSettings) -> None:
    """So that the next start makes it anew."""
    for path in Path(root_of(settings).path).glob("catalogue*"):
        path.unlink()


@dataclass
class Start:
    """A start, in seconds: until the first object is found and until all are, and the scheduler's steps meanwhile."""

    first_s: float = 0.0
    all_s: float = 0.0
    steps: list[float] = field(default_factory=list)


def start(settings: DiskTierSettings, num_objects: int) -> Start:
    """Start a tier and step, as a scheduler does, until it knows all objects."""
    gc.collect()  # else it looks through what the imports have left meanwhile
    result = Start()
    began = time.perf_counter()
    tier = DiskTierManager(settings, NAMESPACE, 1, _OBJECT_BYTES)
    while tier.is_recovering:
        step = time.perf_counter()
        tier.advance()
        result.steps.append(time.perf_counter() - step)
        if not result.first_s and tier.usage().num_objects:
            result.first_s = time.perf_counter() - began
        time.sleep(_STEP_S)
    result.all_s = time.perf_counter() - began
    if (found := tier.usage().num_objects) != num_objects:
        raise RuntimeError(f"{found} of {num_objects} objects were found")
    tier.close()
    return result


def restart(settings: DiskTierSettings, num_objects: int) -> Start:
    """``start`` in a process of its own, as after a restart: what a former tier leaves to its threads takes no time."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(start, settings, num_objects).result()


def row_of(what: str, starts: list[Start]) -> tuple[str, ...]:
    """Medians over the starts. The longest step is the longest of all starts."""
    steps = [each for one in starts for each in one.steps]
    return (
        what,
        f"{median(one.first_s for one in starts):.2f}",
        f"{median(one.all_s for one in starts):.2f}",
        f"{1000 * percentile(steps, 0.99):.2f}",
        f"{1000 * max(steps):.1f}",
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--objects", type=int, default=100_000, help="default: %(default)s, 0.8 GB on disk")
    made.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    made.add_argument("--rows-only", action="store_true", help="no files, and no start without a catalogue")
    arguments = made.parse_args()
    load = os.getloadavg()[0]
    with scratch(arguments.directory) as place:
        settings = DiskTierSettings(root=str(place / "root"), capacity_bytes=64 * GIB, min_free_bytes=0)
        print(f"writing {arguments.objects} objects ...", flush=True)
        (fill_rows if arguments.rows_only else fill)(settings, arguments.objects)
        lost, there = [], []
        for _ in range(arguments.rounds):
            if not arguments.rows_only:
                lose_catalogue(settings)
                lost.append(restart(settings, arguments.objects))
            there.append(restart(settings, arguments.objects))
    columns = ("start", "first object, s", "all, s", "p99 step, ms", "longest step, ms")
    print(
        f"{arguments.objects:,} objects, {arguments.rounds} rounds, files in the page cache, load average {load:.1f}\n"
    )
    rows = [row_of("with its catalogue", there)]
    if lost:
        rows.append(row_of("catalogue lost: from headers", lost))
    print(table(columns, rows))


if __name__ == "__main__":
    main()
