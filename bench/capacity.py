# SPDX-License-Identifier: Apache-2.0
"""How much of its capacity the disk tier uses when many processes store into one root (docs/benchmarks.md)."""

import logging
import os
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from statistics import median

from bench.disk_lab import halves, parser, prompts, scratch
from bench.measure import table
from vllm_overlay.config import MIB
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import file_bytes
from vllm_overlay.tiers.disk.files.root import choose_root
from vllm_overlay.tiers.disk.settings import DiskTierSettings

_OBJECT_BYTES = 28 * 1024
_CAPACITY_BYTES = 128 * MIB
_STORES_PER_S = 1000.0
_POLL_S = 0.002
_FILL_S = 5.0
_READY_S = 120.0


def settings_of(root: str) -> DiskTierSettings:
    return DiskTierSettings(root=root, capacity_bytes=_CAPACITY_BYTES, min_free_bytes=0, staging_bytes=8 * MIB)


def run_member(root: str, part: int, stores_per_s: float, seconds: float, all_are_ready: Barrier | None = None) -> None:
    """One process: it stores objects of its own at a pace, as far as the tier has room."""
    logging.getLogger("vllm_overlay").setLevel(logging.ERROR)
    tier, worker = halves(settings_of(root), _OBJECT_BYTES)
    objects = prompts(_OBJECT_BYTES, num_chunks=1, part=part)
    if all_are_ready is not None:
        all_are_ready.wait(_READY_S)
    began = time.monotonic()
    num_tried = 0
    while (now := time.monotonic() - began) < seconds:
        tier.advance()
        while num_tried < now * stores_per_s:
            num_tried += 1
            if (ticket := tier.reserve(next(objects))) is None:
                continue
            if (buffer := worker.begin_store(ticket)) is None:
                tier.abort(ticket.ticket)
                continue
            worker.submit_store(ticket, buffer)
        for result in worker.poll()[0]:
            tier.abort(result.ticket) if result.reason else tier.commit(result.ticket)
        time.sleep(_POLL_S)
    worker.close(5.0)
    tier.close()


def measure(root: str, num_processes: int, seconds: float) -> tuple[str, ...]:
    """Bytes on a root that was full before, while so many processes store: of objects, and of all that is counted."""
    num_fit = _CAPACITY_BYTES // file_bytes(_OBJECT_BYTES)
    run_member(root, num_processes, num_fit / _FILL_S, _FILL_S)
    context = get_context("spawn")
    all_are_ready = context.Barrier(num_processes + 1)
    rate = _STORES_PER_S / num_processes
    members = [
        context.Process(target=run_member, args=(root, part, rate, seconds, all_are_ready), daemon=True)
        for part in range(num_processes)
    ]
    for member in members:
        member.start()
    all_are_ready.wait(_READY_S)
    chosen = choose_root(Device(), root)
    catalogue = Catalogue(chosen.path, chosen.journal)
    objects, counted = [], []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        totals = catalogue.totals()
        objects.append(totals.object_bytes)
        counted.append(totals.num_bytes)
        time.sleep(0.05)
    catalogue.close()
    for member in members:
        member.join()
    late = objects[len(objects) // 2 :]
    figures = (max(late), median(late), min(late), max(counted))
    return (str(num_processes), *(f"{figure / _CAPACITY_BYTES:.1%}" for figure in figures))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--processes", type=int, nargs="+", default=[1, 8, 31], help="default: 1 8 31")
    made.add_argument("--seconds", type=float, default=10.0, help="of storing each; default: %(default)s")
    arguments = made.parse_args()
    load = os.getloadavg()[0]
    with scratch(arguments.directory) as place:
        rows = [measure(str(place / str(number)), number, arguments.seconds) for number in arguments.processes]
    columns = ("processes", "most bytes of objects", "median", "least", "most with grants and garbage")
    print(f"of a capacity of {_CAPACITY_BYTES // MIB} MiB, load average {load:.1f}\n\n{table(columns, rows)}")


if __name__ == "__main__":
    main()
