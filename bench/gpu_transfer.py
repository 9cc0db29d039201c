# SPDX-License-Identifier: Apache-2.0
"""The CUDA copy engine on a GPU: first whether it brings the right bytes, then how fast, and what it costs the engine.

    python -m bench.gpu_transfer [--quick] [--json FILE]

Starts no engine. The copy engine is compared with one large pinned copy (the reference), with plain torch indexing,
and with copies of whole pages by the driver, as vLLM's own offloading makes them. Its test
takes all of it through a fake device, whose figures mean nothing.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.gpu_case import Case, Rig, Row
from bench.gpu_workloads import LAYOUTS, LLAMA, QWEN, Model, Workload, chunks, snapshots
from bench.measure import table
from vllm_overlay.tiers.memory import Bytes
from vllm_overlay.transfer.pinned import PinnedMemory

_OUTSTANDING = 2
"""Copies under way beside matrix products."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer matrix products take beside copies: 1.0 is not at all."""

    beside: str
    factor: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    models: tuple[tuple[Model, int], ...]
    """Each model with the number of blocks of its KV cache. Half of them are stored, or loaded."""
    rounds: int
    product_size: int
    products: int


FULL = Scale(((QWEN, 16), (LLAMA, 256)), rounds=9, product_size=8192, products=60)
QUICK = Scale(((QWEN, 4), (LLAMA, 32)), rounds=3, product_size=8192, products=10)


def workloads(model: Model, num_blocks: int) -> Iterator[Workload]:
    """Chunks of 16 tokens, of 64 and of a block, where a block is that large; snapshots, where there are states."""
    for tokens in sorted({min(tokens, model.block_tokens) for tokens in (16, 64, model.block_tokens)}):
        yield chunks(model, tokens, num_blocks)
    if model.state_layers:
        yield snapshots(model, num_blocks)


def cases(rig: Rig, scale: Scale) -> Iterator[Case]:
    """The cases, one after the other. Each is closed before the next one."""
    for model, num_blocks in scale.models:
        for layout in LAYOUTS:
            for workload in workloads(model, num_blocks):
                case = Case(rig, model, layout, workload, num_blocks)
                try:
                    yield case
                finally:
                    case.close()


def slowdowns(case: Case, scale: Scale) -> list[Slowdown]:
    """Matrix products in the compute stream: alone, beside loads, beside stores."""
    size = scale.product_size
    factor = torch.randn(size, size, device=case.rig.torch_device).to(torch.bfloat16)
    product = torch.empty_like(factor)

    def seconds(beside: Callable[[], None]) -> float:
        case.finish()
        start = time.perf_counter()
        for _ in range(scale.products):
            beside()
            torch.mm(factor, factor, out=product)
        case.rig.finish_compute()
        return time.perf_counter() - start

    seconds(lambda: None)
    alone = seconds(lambda: None)
    found = []
    for name, submit in (("loads", case.load), ("stores", case.store)):
        pace = _Pace(case, submit)
        beside = seconds(pace.step)
        found.append(Slowdown(name, beside / alone, pace.num_bytes / beside / 1e9))
    case.finish()
    return found


class _Pace:
    """Submits a copy whenever fewer than ``_OUTSTANDING`` are under way."""

    def __init__(self, case: Case, submit: Callable[[], None]) -> None:
        self._case, self._submit = case, submit
        self._outstanding = 0
        self.num_bytes = 0

    def step(self) -> None:
        self._outstanding -= self._case.num_ended()
        if self._outstanding < _OUTSTANDING:
            self._submit()
            self._outstanding += 1
            self.num_bytes += self._case.workload.num_bytes


def measure(rig: Rig, scale: Scale, report: Callable[[str], None]) -> dict[str, list[dict[str, object]]] | None:
    """All figures. ``report`` hears of each as it comes. None as soon as a byte is wrong."""
    rows: list[Row] = []
    found: list[Slowdown] = []
    for case in cases(rig, scale):
        name = f"{case.model.name}, {case.layout}, {case.workload.name}"
        if not case.is_right():
            report(f"{name}: WRONG BYTES. No figure of this run means anything.")
            return None
        new = case.bandwidth(scale.rounds)
        report(f"\n{name}: every byte is right\n\n{_table(new)}")
        rows += new
        if case.workload.name == chunks(case.model, min(64, case.model.block_tokens), 2).name:
            beside = slowdowns(case, scale)
            report("".join(f"\nmatrix products beside {item.beside}: {item.factor:.3f}" for item in beside))
            found += beside
    return {"bandwidth": [asdict(row) for row in rows], "slowdown": [asdict(item) for item in found]}


def _table(rows: Sequence[Row]) -> str:
    columns = ("way", "MB", "GB/s", "share of one large copy", "host us a step")
    return table(
        columns,
        [
            (row.way, f"{row.megabytes:.1f}", f"{row.gb_per_s:.1f}", f"{row.share:.2f}", f"{row.host_us:.0f}")
            for row in rows
        ],
    )


def cuda_rig() -> Rig:
    """The current CUDA device."""
    from vllm_overlay.transfer.cuda_device import CudaDevice

    device = torch.device("cuda", torch.cuda.current_device())

    def pin(array: Bytes) -> Callable[[], None]:
        pinned = PinnedMemory(array)
        if not pinned.is_pinned:
            raise RuntimeError("the CUDA driver registers no host memory: see the warning above")
        return pinned.unregister

    return Rig(
        CudaDevice(device), device, torch.cuda.synchronize, lambda: torch.cuda.current_stream().synchronize(), pin
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_transfer", description="Measures the CUDA copy engine.")
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench.gpu_transfer needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 2
    torch.zeros(1, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    figures = measure(cuda_rig(), QUICK if options.quick else FULL, lambda text: print(text, flush=True))
    if figures is None:
        return 1
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "machine": platform.platform()}
        options.json.write_text(json.dumps(figures | about, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
