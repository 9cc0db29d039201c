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


def proc_with(directory: Path, available_kib: int) -> Path:
    (directory / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {available_kib} kB\n")
    return directory


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [
        ({}, 4096 * 1024),
        ({"memory.max": "max\n", "memory.current": "100\n"}, 4096 * 1024),
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ({"memory.max": "1000\n", "memory.current": "1400\n"}, 0),
        ({"memory/memory.limit_in_bytes": "2000", "memory/memory.usage_in_bytes": "500"}, 1500),
        ({"memory.max": "9999999999999", "memory.current": "1"}, 4096 * 1024),
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
