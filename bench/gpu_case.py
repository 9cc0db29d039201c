# SPDX-License-Identifier: Apache-2.0
"""One workload on one KV cache: whether the copy engine brings the right bytes, and how fast beside other ways."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bench.gpu_workloads import ATTENTION, Groups, Model, Workload, host_pool, kv_cache, object_bytes
from bench.measure import Subject, take_turns
from vllm_overlay.tiers.memory import Bytes, HostPool
from vllm_overlay.transfer.base import KVTransfer, Placement
from vllm_overlay.transfer.copy_table import CopyTable
from vllm_overlay.transfer.cuda import CudaTransfer

if TYPE_CHECKING:
    from vllm_overlay.transfer.cuda_device import CudaDevice

POISON = 0xA5
_CLOSE_S = 60.0


@dataclass(slots=True)
class Rig:
    """What the copies run on. ``pin`` registers host memory and returns how to take that back."""

    device: "CudaDevice"
    torch_device: torch.device
    synchronize: Callable[[], None]
    """Waits for all that was submitted."""
    finish_compute: Callable[[], None]
    """Waits for the compute stream alone."""
    pin: Callable[[Bytes], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to move a workload. ``share`` is of a single large pinned copy in the same direction and run."""

    model: str
    layout: str
    workload: str
    way: str
    megabytes: float
    gb_per_s: float
    share: float
    host_us: float
    """Microseconds of the calling thread, until the submission has returned. 0 if not measured."""


class Case:
    """A workload on a KV cache, host memory for it, and a transfer."""

    def __init__(self, rig: Rig, model: Model, layout: str, workload: Workload, num_blocks: int) -> None:
        self.rig, self.model, self.layout, self.workload = rig, model, layout, workload
        self.groups = kv_cache(model, layout, num_blocks, rig.torch_device)
        self._pools: list[tuple[HostPool, Callable[[], None]]] = []
        self.pool, self.buffers = host_pool(workload)
        self._pin(self.pool)
        self.transfer: KVTransfer = CudaTransfer(self.groups, rig.device)

    def close(self) -> None:
        if self.transfer.close(_CLOSE_S):
            for _, unpin in self._pools:
                unpin()

    def _pin(self, pool: HostPool) -> HostPool:
        """Until the case is closed."""
        self._pools.append((pool, self.rig.pin(pool.array)))
        return pool

    def finish(self) -> None:
        """Waits for all that was submitted; raises what went wrong."""
        self.rig.synchronize()
        self.num_ended()

    def num_ended(self) -> int:
        """Copies that have ended since the last call; raises what one of them failed with."""
        ended = self.transfer.poll()
        for copy in ended:
            if copy.error is not None:
                raise copy.error
        return len(ended)

    def store(self) -> None:
        if self.transfer.gather(self.workload.placements, self.buffers) is None:
            raise RuntimeError(f"the device ring is full: {self.workload.num_bytes} bytes do not fit")

    def load(self) -> None:
        self.transfer.scatter(self.workload.placements, self.buffers)

    def is_right(self) -> bool:
        """Both ways, on random bytes with poison where they are to go: these arrive, and nothing else changes."""
        expected = self._randomized()
        self.pool.array[:] = POISON
        self.store()
        self.finish()
        for placement, buffer in zip(self.workload.placements, self.buffers, strict=True):
            found = torch.cat([torch.from_numpy(segment) for segment in buffer.segments()])
            if not torch.equal(found, object_bytes(self.groups, placement).cpu()):
                return False
        for placement in self.workload.elsewhere:
            _write(expected, placement, POISON)
            _write(self.groups, placement, POISON)
        for source, target in zip(self.workload.placements, self.workload.elsewhere, strict=True):
            _copy(expected, source, target)
        self.transfer.scatter(self.workload.elsewhere, self.buffers)
        self.finish()
        return all(
            torch.equal(found, wanted)
            for group_id, group in self.groups.items()
            for found, wanted in zip(group.layers, expected[group_id].layers, strict=True)
        )

    def _randomized(self) -> Groups:
        """Random bytes in the KV cache, and a copy of it."""
        expected = kv_cache(self.model, self.layout, self.groups[ATTENTION].layers[0].shape[0], self.rig.torch_device)
        for group_id, group in self.groups.items():
            for layer, twin in zip(group.layers, expected[group_id].layers, strict=True):
                layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8, device=layer.device))
                twin.copy_(layer)
        return expected

    def bandwidth(self, rounds: int) -> list[Row]:
        """Every way in turns, so that whatever else the machine does hits all of them."""
        whole = _flat(self.pool)
        on_device = torch.empty_like(whole, device=self.rig.torch_device)
        size = whole.numel()
        sides = [
            [
                self._subject(
                    "store: one large copy", lambda: whole.copy_(on_device, non_blocking=True), whole.numel()
                ),
                self._subject("store: copy engine", self.store),
                *self._other_ways("store"),
            ],
            [
                self._subject("load: one large copy", lambda: on_device.copy_(whole, non_blocking=True), size),
                self._subject("load: copy engine", self.load),
                *self._other_ways("load"),
            ],
        ]
        take_turns(sides, rounds)
        return [self._row(subject, side[0]) for side in sides for subject in side]

    def _subject(self, name: str, submit: Callable[[], object], num_bytes: int | None = None) -> Subject:
        def run() -> None:
            submit()
            self.finish()

        return Subject(name, self.workload.num_bytes if num_bytes is None else num_bytes, run)

    def _row(self, subject: Subject, reference: Subject) -> Row:
        is_ours = subject.name.endswith("copy engine")
        submit = self.store if subject.name.startswith("store") else self.load
        return Row(
            self.model.name,
            self.layout,
            self.workload.name,
            subject.name,
            subject.num_bytes / 1e6,
            subject.gb_per_s,
            subject.share_of(reference),
            self._host_us(submit) if is_ours else 0.0,
        )

    def _host_us(self, submit: Callable[[], None]) -> float:
        """The median of some submissions, each to an idle device."""
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            submit()
            seconds.append(time.perf_counter() - start)
            self.finish()
        return statistics.median(seconds) * 1e6

    def _other_ways(self, direction: str) -> list[Subject]:
        return [
            self._subject(f"{direction}: pages by the driver", *self._page_copies(direction)),
            self._subject(f"{direction}: torch indexing", *self._indexing(direction)),
        ]

    @property
    def _pages(self) -> list[tuple[int, int]]:
        """The pages that the workload touches, each once."""
        touched = {page for placement in self.workload.placements for page in placement.pages}
        touched |= {(span.group_id, span.block_id) for item in self.workload.placements for span in item.spans}
        return sorted(touched)

    def _page_copies(self, direction: str) -> tuple[Callable[[], None], int]:
        """Whole pages between the KV cache and host memory in one call, without a kernel and without a ring."""
        placement = Placement(tuple(self._pages))
        num_bytes = sum(self.groups[group_id].page_bytes for group_id, _ in placement.pages)
        pool = self._pin(HostPool(1, num_bytes))
        copies = _raw_pages(self.groups, placement).moved(0, pool.array.ctypes.data)
        stream, is_load = self.rig.device.new_stream(), direction == "load"
        if is_load:
            copies = copies.reversed()

        def submit() -> None:
            stream.wait_for(self.rig.device.compute_stream().record())
            stream.copy(copies, source_is_stable=is_load)

        return submit, num_bytes

    def _indexing(self, direction: str) -> tuple[Callable[[], None], int]:
        """Whole pages of each layer by ``layer[blocks]``, and a pinned copy of that."""
        moves = []
        for group_id in sorted({group_id for group_id, _ in self._pages}):
            blocks = torch.tensor([block for own, block in self._pages if own == group_id])
            for layer in self.groups[group_id].layers:
                pool = self._pin(HostPool(1, layer[0].numel() * len(blocks)))
                moves.append((layer, blocks.to(layer.device), _flat(pool).view(len(blocks), *layer.shape[1:])))

        def submit() -> None:
            for layer, blocks, host in moves:
                if direction == "store":
                    host.copy_(layer[blocks], non_blocking=True)
                else:
                    layer[blocks] = host.to(layer.device, non_blocking=True)

        return submit, sum(host.numel() for _, _, host in moves)


def _flat(pool: HostPool) -> torch.Tensor:
    return torch.from_numpy(pool.array.reshape(-1))


def _raw_pages(groups: Groups, placement: Placement) -> CopyTable:
    """Each page as it lies in memory (in the order of its strides) to offsets one after the other."""
    copies, offset = [], 0
    for group_id, block in placement.pages:
        for layer in groups[group_id].layers:
            page = layer[block]
            copies.append((page.data_ptr(), offset, 1, page.numel(), page.numel(), page.numel()))
            offset += page.numel()
    return CopyTable.of(copies)


def _write(groups: Groups, placement: Placement, value: int) -> None:
    for piece in _views(groups, placement):
        piece.fill_(value)


def _copy(groups: Groups, source: Placement, target: Placement) -> None:
    for ours, theirs in zip(_views(groups, target), _views(groups, source), strict=True):
        ours.copy_(theirs)


def _views(groups: Groups, placement: Placement) -> list[torch.Tensor]:
    views = [layer[block] for group_id, block in placement.pages for layer in groups[group_id].layers]
    for span in placement.spans:
        tokens = slice(span.offset, span.offset + span.num_tokens)
        views += [layer[span.block_id, :, tokens] for layer in groups[span.group_id].layers]
    return views
