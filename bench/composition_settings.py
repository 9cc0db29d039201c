# SPDX-License-Identifier: Apache-2.0
"""What the replay of ``bench.composition`` is run with: how two tiers come to hold different things."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bench.replay import Replay, ReplayTier
from bench.replay_tiers import Admission, IndexShelf, OpenShelf, Shelf
from vllm_overlay.planner.geometry import Geometry

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. ``compared_to`` names the row with the tiers as they ship. If it is empty, that is the row itself.

    ``keeps`` says what a tier holds. With *chains* it holds an object only with all that it builds on, as the
    production index does. With *objects* it holds each object for itself. With *objects, refreshed*, a pass of a stored
    object also counts as a use. ``disk_gets``: all stores, what the CPU evicts, or that and nothing that the CPU has.
    Restarts empty a tier, at equal distances in the trace.
    """

    name: str
    disk_per_cpu: float = 4.0
    nth_use: int = 1
    write_mb_per_s: int = 0
    lost_share: float = 0.0
    seed: int = 0
    cpu_restarts: int = 0
    disk_restarts: int = 0
    disk_gets: Literal["stores", "evicted", "exclusive"] = "stores"
    keeps: Literal["chains", "objects", "objects, refreshed"] = "chains"
    offers_restored: bool = False
    compared_to: str = ""


_SHIPPED = (
    Setting("both store all"),
    Setting("store_on_nth_use 2", nth_use=2),
    Setting("store_on_nth_use 3", nth_use=3),
    Setting("disk writes 50 MB/s", write_mb_per_s=50),
    Setting("disk writes 100 MB/s", write_mb_per_s=100),
    Setting("disk writes 200 MB/s", write_mb_per_s=200),
    *(Setting(f"1 in 4 disk stores ends early, seed {seed}", lost_share=0.25, seed=seed) for seed in (1, 2, 3)),
    Setting("CPU restarted once", cpu_restarts=1),
    Setting("CPU restarted 5 times", cpu_restarts=5),
    Setting("disk emptied once", disk_restarts=1),
    Setting("disk emptied 5 times", disk_restarts=5),
    Setting("disk as large as CPU", disk_per_cpu=1.0),
    Setting("CPU 4 times the disk", disk_per_cpu=0.25),
    Setting("restored states offered", offers_restored=True),
)
_CAPACITY = (
    Setting("both store all, disk 5 times the CPU", disk_per_cpu=5.0, compared_to="both store all"),
    Setting("both store all, disk twice the CPU", disk_per_cpu=2.0, compared_to="disk as large as CPU"),
)
"""What the disk would have to be to hold as much as both tiers together without anything twice."""
_THIRD_PARTIES = (
    Setting("disk gets what CPU evicts", disk_gets="evicted", compared_to="both store all"),
    Setting("never in both", disk_gets="exclusive", compared_to="both store all"),
    Setting(
        "never in both, disk as large as CPU",
        disk_per_cpu=1.0,
        disk_gets="exclusive",
        compared_to="disk as large as CPU",
    ),
    Setting(
        "never in both, CPU 4 times the disk",
        disk_per_cpu=0.25,
        disk_gets="exclusive",
        compared_to="CPU 4 times the disk",
    ),
)


def _by_object(name: str, keeps: Literal["objects", "objects, refreshed"]) -> Setting:
    shipped = next(setting for setting in _SHIPPED if setting.name == name)
    return replace(shipped, name=f"{name}; {keeps}", keeps=keeps, compared_to=name)


SETTINGS = (
    *_SHIPPED,
    *_CAPACITY,
    *_THIRD_PARTIES,
    _by_object("both store all", "objects"),
    _by_object("both store all", "objects, refreshed"),
    _by_object("store_on_nth_use 2", "objects"),
    _by_object("store_on_nth_use 2", "objects, refreshed"),
    _by_object("disk writes 100 MB/s", "objects"),
    _by_object("disk writes 100 MB/s", "objects, refreshed"),
)


def build(
    setting: Setting, geometry: Geometry, cpu_bytes: int, num_requests: int, composes: bool
) -> tuple[Replay, Callable[[int], None]]:
    """The replay of a setting, and what to call with the place of each request before it is served."""
    tiers: list[ReplayTier] = []
    replay = Replay(geometry, tiers, composes, setting.offers_restored)
    largest = geometry.largest_object_bytes
    cpu, disk = _shelves(setting, cpu_bytes, int(cpu_bytes * setting.disk_per_cpu))
    tiers.append(ReplayTier(cpu, Admission(replay.clock, largest)))
    admission = Admission(
        replay.clock, largest, setting.nth_use, setting.write_mb_per_s * MB, setting.lost_share, setting.seed
    )
    tiers.append(ReplayTier(disk, admission, takes_stores=setting.disk_gets == "stores"))
    restarts = [(cpu, setting.cpu_restarts), (disk, setting.disk_restarts)]
    return replay, _restarter(restarts, num_requests)


def _shelves(setting: Setting, cpu_bytes: int, disk_bytes: int) -> tuple[Shelf, Shelf]:
    cpu = _shelf(setting, cpu_bytes)
    if setting.disk_gets == "stores":
        return cpu, _shelf(setting, disk_bytes)
    disk = OpenShelf(disk_bytes)
    cpu.evicted = disk.take
    if setting.disk_gets == "exclusive":
        cpu.stored = disk.drop
    return cpu, disk


def _shelf(setting: Setting, capacity_bytes: int) -> IndexShelf | OpenShelf:
    if setting.keeps == "chains":
        return IndexShelf(capacity_bytes)
    return OpenShelf(capacity_bytes, refreshes=setting.keeps == "objects, refreshed")


def _restarter(restarts: Sequence[tuple[Shelf, int]], num_requests: int) -> Callable[[int], None]:
    places = [
        (shelf, {num_requests * turn // (count + 1) for turn in range(1, count + 1)}) for shelf, count in restarts
    ]

    def before(place: int) -> None:
        for shelf, its_places in places:
            if place in its_places:
                shelf.clear()

    return before
