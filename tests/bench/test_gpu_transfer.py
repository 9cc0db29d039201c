# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the CUDA copy engine, on a fake device: what it checks, and that it says what it needs."""

import pytest
import torch

from bench.gpu_case import Case, Rig
from bench.gpu_transfer import Scale, measure
from bench.gpu_workloads import LAYOUTS, Model, Workload, chunks, snapshots
from tests.python_path import run_python
from tests.transfer.fake_device import FakeDevice, FakeStream
from vllm_overlay.transfer.copy_table import CopyTable

HYBRID = Model("hybrid", 32, layers=2, heads=2, cell_bytes=1024, state_layers=2, state_bytes=40_000)
DENSE = Model("dense", 16, layers=2, heads=3, cell_bytes=256)
NUM_BLOCKS = 4
WORKLOADS = [chunks(HYBRID, 16, NUM_BLOCKS), chunks(HYBRID, 32, NUM_BLOCKS), snapshots(HYBRID, NUM_BLOCKS)]


def rig() -> Rig:
    device = FakeDevice()
    return Rig(device, torch.device("cpu"), device.run_all, device.run_all, lambda _: lambda: None)


def case(workload: Workload, layout: str) -> Case:
    return Case(rig(), HYBRID, layout, workload, NUM_BLOCKS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_right_bytes_are_found_right(workload: Workload, layout: str) -> None:
    assert case(workload, layout).is_right()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_copy_that_is_left_out_is_found(
    workload: Workload, layout: str, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of each operation, on the compute stream, the store stream, the load stream."""
    made = case(workload, layout)
    broken = made.rig.device.streams[stream]  # type: ignore[attr-defined]
    run, copy = broken.run, broken.copy
    monkeypatch.setattr(broken, "run", lambda table: run(CopyTable(table.fields[:, 1:])))
    monkeypatch.setattr(broken, "copy", lambda table, **how: copy(CopyTable(table.fields[:, 1:]), **how))
    assert not made.is_right()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_byte_beside_the_target_is_found(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(WORKLOADS[0], layout)
    scatter = made.transfer.scatter

    def scatter_and_spoil(*arguments: object) -> object:
        handle = scatter(*arguments)  # type: ignore[arg-type]
        made.groups[0].layers[1][made.workload.placements[0].spans[0].block_id, 1, 5, 7] ^= 1
        return handle

    monkeypatch.setattr(made.transfer, "scatter", scatter_and_spoil)
    assert not made.is_right()


def test_every_figure_is_there() -> None:
    lines: list[str] = []
    scale = Scale(((HYBRID, NUM_BLOCKS), (DENSE, NUM_BLOCKS)), rounds=1, product_size=8, products=3)
    figures = measure(rig(), scale, lines.append)
    assert figures is not None
    ways = [f"{way}: {name}" for way in ("store", "load") for name in NAMES]
    assert [row["way"] for row in figures["bandwidth"][: len(ways)]] == ways
    assert len(figures["bandwidth"]) == (2 * 3 + 2 * 1) * len(ways)
    assert all(row["gb_per_s"] > 0 and row["share"] > 0 for row in figures["bandwidth"])  # type: ignore[operator]
    ours = [row for row in figures["bandwidth"] if "copy engine" in str(row["way"])]
    assert all(row["host_us"] > 0 for row in ours)  # type: ignore[operator]
    assert [item["beside"] for item in figures["slowdown"]] == ["loads", "stores"] * 4
    assert any("every byte is right" in line for line in lines)


NAMES = ["one large copy", "copy engine", "pages by the driver", "torch indexing"]


def test_wrong_bytes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(FakeStream, "run", lambda self, table: None)
    assert measure(rig(), Scale(((DENSE, NUM_BLOCKS),), 1, 8, 1), lines.append) is None
    assert "WRONG BYTES" in lines[-1]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_python("-m", "bench.gpu_transfer")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench.gpu_transfer needs a CUDA device, and torch finds none here.\n"
