# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the disk tier's files, with few bytes."""

from pathlib import Path

from bench import object_cpu
from vllm_overlay.tiers.disk.files.checksum import XXH3


def test_the_cpu_time_of_one_object_is_measured_and_leaves_no_object(tmp_path: Path) -> None:
    cost = object_cpu.measure(tmp_path / "root", 100_000, XXH3, direct=False)
    assert cost.write_us > 0 and cost.read_us > 0
    assert not list((tmp_path / "root").rglob("*.r0"))
