# SPDX-License-Identifier: Apache-2.0
"""A CPU tier that is too small for its objects, or too large for the machine, is refused with a size that works."""

from pathlib import Path

import pytest

from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.cpu import arena_units, check_free_memory
from vllm_overlay.tiers.memory import available_memory

UNIT = 16384
SNAPSHOT = 10 * UNIT + 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_arena_smaller_than_one_snapshot_is_refused_with_a_size_that_works(world_size: int) -> None:
    with pytest.raises(ConfigError) as refusal:
        arena_units(11 * UNIT * world_size - 1, world_size, UNIT, SNAPSHOT)
    assert "smaller than one snapshot" in str(refusal.value)
    assert f"set it to at least {11 * UNIT * world_size} bytes" in str(refusal.value)
    assert arena_units(11 * UNIT * world_size, world_size, UNIT, SNAPSHOT) == 11


def test_an_arena_above_free_memory_is_refused_with_what_is_free() -> None:
    check_free_memory(1000, 1000)
    with pytest.raises(ConfigError, match="more than the 1000 bytes of memory that are free: set it to at most 1000"):
        check_free_memory(1001, 1000)


def test_the_refusal_names_what_vllm_took_on_a_cpu_and_how_much_less_works() -> None:
    """Seen with the defaults of a CPU server: 592 MB were left for 1 GiB."""
    with pytest.raises(ConfigError, match="have its own KV cache take 460MiB less, by --kv-cache-memory-bytes or by"):
        check_free_memory(1 << 30, 592_000_000)


SERVICE = "system.slice/vllm.service"


def proc_with(directory: Path, available_kib: int) -> Path:
    (directory / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {available_kib} kB\n")
    (directory / "self").mkdir()
    (directory / "self" / "cgroup").write_text(f"4:memory:/{SERVICE}\n3:cpu,cpuacct:/\n0::/{SERVICE}\n")
    return directory


def v2(limit: int | str, usage: int, active: int = 0, inactive: int = 0) -> dict[str, str]:
    stat = f"anon 5\nactive_file {active}\ninactive_file {inactive}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}


def below(group: str, files: dict[str, str]) -> dict[str, str]:
    return {str(Path(name).parent / group / Path(name).name): text for name, text in files.items()}


def v1(limit: int, usage: int, active: int = 0, inactive: int = 0) -> dict[str, str]:
    """The first version counts a group's own pages and, as ``total``, those of the groups below it too."""
    stat = f"active_file 7\ntotal_active_file {active}\ntotal_inactive_file {inactive}\n"
    files = {"limit_in_bytes": str(limit), "usage_in_bytes": str(usage), "stat": stat}
    return {f"memory/memory.{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [
        ({}, 4096 * 1024),
        (v2("max", 100), 4096 * 1024),
        (v2(1000, 400), 600),
        (v2(1000, 1400), 0),
        (v2(1000, 950, active=100, inactive=300), 450),
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        (v1(2000, 500), 1500),
        (v1(2000, 1900, active=100, inactive=300), 500),
        (v2(9999999999999, 1), 4096 * 1024),
        # MemoryMax= of a service, or of the slice that it is in, and a job of Slurm: no container.
        (below(SERVICE, v2(1000, 400)), 600),
        (below("system.slice", v2(1000, 400)) | below(SERVICE, v2("max", 300)), 600),
        (v1(2000, 500) | below(SERVICE, v1(1000, 400)), 600),
    ],
)
def test_free_memory_is_the_machines_or_what_the_control_group_leaves(
    tmp_path: Path, files: dict[str, str], num_bytes: int
) -> None:
    cgroup = tmp_path / "cgroup"
    for name, text in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text)
    assert available_memory(proc_with(tmp_path, available_kib=4096), cgroup) == num_bytes
