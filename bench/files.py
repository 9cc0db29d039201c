# SPDX-License-Identifier: Apache-2.0
"""The disk tier's files by their size, beside raw O_DIRECT and other tiers' file code (docs/benchmarks.md)."""

import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.disk_lab import parser, scratch
from bench.file_sides import (
    READ_THREADS,
    STAGING_BYTES,
    WRITE_THREADS,
    LMCache,
    Ours,
    Side,
    Tier,
    Vllm,
    fs_tier,
    hybrid_disk,
)
from bench.measure import Subject, table, take_turns, write_json
from bench.rawdisk import RawFiles, settle
from vllm_overlay.config import KIB, MIB
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import choose_root, takes_direct_io
from vllm_overlay.tiers.memory import HostPool

SIZES = (256 * KIB, MIB, 4 * MIB, 64 * MIB)
_PAUSE_S = 0.3


@dataclass(frozen=True, slots=True)
class Row:
    """One tier's code with objects of one size. Shares are of raw O_DIRECT in the same rounds.

    ``cpu``: microseconds of the processor for an object, of the whole process.
    """

    mib: float
    what: str
    store_gb_per_s: float
    store_share: float
    load_gb_per_s: float
    load_share: float
    store_cpu_us: float = math.nan
    load_cpu_us: float = math.nan


def bench_size(directory: Path, object_bytes: int, total_bytes: int, rounds: int, lmcache: Path | None) -> list[Row]:
    """All sides take turns with the same objects' sizes and numbers."""
    count = max(1, total_bytes // object_bytes)
    num_bytes = count * object_bytes
    direct = takes_direct_io(Device(), choose_root(Device(), str(directory / "tier")))
    pool = HostPool(STAGING_BYTES // MIB, MIB)
    pool.array[:] = 7
    memory = pool.array.reshape(-1).data
    key_file = directory / "key"
    key_file.write_bytes(os.urandom(32))
    key_file.chmod(0o600)
    sides: dict[str, Side] = {
        "ours, XXH3": Ours(directory / "tier", object_bytes),
        "ours, AES-256-GCM": Ours(directory / "encrypted" / "tier", object_bytes, encryption_key_file=str(key_file)),
        "vLLM's fs tier, no checksum": Vllm(directory / "vllm", object_bytes, memory, direct),
        "hybrid_disk, by jobs": Tier(directory / "hybrid", object_bytes, memory, hybrid_disk(directory / "hybrid")),
        "vLLM's fs tier, by jobs": Tier(directory / "fs", object_bytes, memory, fs_tier(directory / "fs")),
    }
    if lmcache is not None:
        sides["LMCache's fs_native, no checksum"] = LMCache(
            directory / "lmcache", object_bytes, memory, direct, lmcache
        )
    raw = RawFiles(directory, memory, WRITE_THREADS, READ_THREADS, direct)
    rest = lambda: time.sleep(_PAUSE_S)  # noqa: E731

    def clean_raw() -> None:
        raw.remove()
        settle(directory)

    reference = [
        Subject("raw", num_bytes, lambda: raw.write(num_bytes), prepare=rest),
        Subject("raw", num_bytes, raw.read, prepare=rest, clean_up=clean_raw),
    ]
    subjects = {what: _subjects(side, num_bytes, count) for what, side in sides.items()}
    take_turns([reference, *subjects.values()], rounds)
    for side in sides.values():
        side.close()
    rows = [
        Row(
            object_bytes / MIB,
            what,
            store.gb_per_s,
            store.share_of(raw_store),
            load.gb_per_s,
            load.share_of(raw_load),
            math.nan if what == "raw" else store.cpu_us_of(count),
            math.nan if what == "raw" else load.cpu_us_of(count),
        )
        for (raw_store, raw_load) in [reference]
        for what, (store, load) in {"raw": reference, **subjects}.items()
    ]
    if lmcache is None:
        rows.append(Row(object_bytes / MIB, "LMCache's fs_native: not run", *[math.nan] * 4))
    return rows


def _subjects(side: Side, num_bytes: int, count: int) -> list[Subject]:
    turns = itertools.count()

    def prepare() -> None:
        turn = next(turns)
        side.prepare([f"{turn}-{number}".encode().rjust(32, b"\0")[::-1] for number in range(count)])
        time.sleep(_PAUSE_S)

    def clean_up() -> None:
        side.remove()
        settle(side.directory.parent)

    return [
        Subject("store", num_bytes, side.store, prepare=prepare),
        Subject("load", num_bytes, side.load, prepare=lambda: time.sleep(_PAUSE_S), clean_up=clean_up),
    ]


def _cells(row: Row) -> list[str]:
    figures = list(asdict(row).values())[2:]
    return ["" if math.isnan(figure) else f"{figure:.{2 if figure < 100 else 0}f}" for figure in figures]


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    made.add_argument("--lmcache", type=Path, metavar="DIR", help="where an lmcache wheel is unpacked; else not run")
    options = made.parse_args(arguments)
    total_bytes, rounds = (128 * MIB, 2) if options.quick else (256 * MIB, 7)
    rows = []
    for object_bytes in SIZES:
        with scratch(options.directory) as place:
            rows += bench_size(place, object_bytes, total_bytes, rounds, options.lmcache)
        print(f"{object_bytes / MIB} MiB done, load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    columns = ("object", "code", "store GB/s", "of raw", "load GB/s", "of raw", "store CPU us", "load CPU us")
    cells = [(f"{row.mib:g} MiB", row.what, *_cells(row)) for row in rows]
    print(f"{rounds} rounds of {total_bytes // MIB} MiB\n\n{table(columns, cells)}")
    if options.json:
        write_json(options.json, rows=[asdict(row) for row in rows], quick=options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
