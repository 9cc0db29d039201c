# SPDX-License-Identifier: Apache-2.0
"""The benchmark of restores: both lives restore what they say they time."""

from pathlib import Path

import pytest

from bench import restore
from bench.restore import measure, ratios, summary


@pytest.mark.engines
@pytest.mark.engine
def test_a_prompt_comes_from_memory_and_after_a_restart_from_the_disk(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "BATCHES", (2,))
    monkeypatch.setattr(restore, "STEPS", 4)
    monkeypatch.setitem(restore.DISK, "capacity_bytes", 128 << 20)
    plain, ours = measure(["no connector", "ours"], tiny_model, "cpu", 2400, 1, print)
    assert plain.restored == {"cold": 0, "memory": 0, "disk": 0}
    assert ours.restored["cold"] == 0
    assert ours.restored["memory"] == ours.restored["disk"] == 2368
    assert [len(found) for found in (ours.cold, ours.memory, ours.disk, ours.steps[2])] == [2, 2, 2, 2]
    _, _, _, row = summary([plain, ours], 2400, 1e9).splitlines()
    assert f"{ours.restored['memory']} / {ours.restored['disk']}" in row
    monkeypatch.setattr(restore, "RIVAL", plain.name)
    ours.memory, plain.memory = [1.0, 0.25], [1.0, 0.5]
    ours.disk, plain.disk = [1.0, 0.5], [1.0, 2.0]
    assert "0.50 (0.50 to 0.50) | 0.25 (0.25 to 0.25)" in ratios([plain, ours])
    ours.restored["disk"] = 0  # what was computed was not loaded
    assert "0.50 (0.50 to 0.50)" in (said := ratios([plain, ours])) and "0.25" not in said


def test_it_takes_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        restore.main(["--rounds", "0"])
    assert "--rounds: at least 1" in capsys.readouterr().err
