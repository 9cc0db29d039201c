# SPDX-License-Identifier: Apache-2.0
"""What CudaTransfer submits and when its copies end, on a fake device. Its worker: tests/connector/test_worker.py."""

import time
from typing import Any

import pytest
import torch

from tests.transfer import naive
from tests.transfer.fake_device import DeviceError, FakeDevice, FakeStream
from vllm_overlay.tiers.memory import HostBuffer
from vllm_overlay.transfer.base import FinishedCopy, Placement, Span
from vllm_overlay.transfer.copy_table import CopyTable
from vllm_overlay.transfer.cuda import CudaTransfer
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import CellMap

TOKENS, CELL = 4, 2
CHUNK_BYTES = TOKENS * CELL


def chunk(block: int) -> Placement:
    return Placement(spans=(Span(0, block, 0, TOKENS),))


class Made:
    """A transfer of chunks of 8 bytes on a fake device. A submission takes a multiple of 256 bytes of the ring."""

    def __init__(self, ring_bytes: int = 1024, num_heads: int = 1, **settings: Any) -> None:
        self.layer = torch.zeros(8, num_heads, 2 * TOKENS, CELL // num_heads, dtype=torch.uint8)
        self.device = FakeDevice()
        groups = {0: GroupTensors((self.layer,), CellMap())}
        self.transfer = CudaTransfer(groups, self.device, ring_bytes=ring_bytes, **settings)
        self.pool = naive.random_pool(16, CHUNK_BYTES, seed=1)

    @property
    def store_stream(self) -> FakeStream:
        return self.device.streams[1]

    @property
    def load_stream(self) -> FakeStream:
        return self.device.streams[2]

    def fill(self, block: int, value: int) -> None:
        """The engine computes."""
        self.device.compute.submit(lambda: self.layer[block].fill_(value))

    def buffer(self, unit: int) -> HostBuffer:
        return self.pool.buffer((unit,), CHUNK_BYTES)


@pytest.fixture
def made() -> Made:
    return Made()


# Stores.


def test_a_step_is_one_kernel_on_the_compute_stream_and_one_copy_an_object(made: Made) -> None:
    made.transfer.gather([chunk(block) for block in range(4)], [made.buffer(unit) for unit in range(4)])
    assert [stream.kernels for stream in made.device.streams] == [1, 0, 0]
    assert made.store_stream.engine_copies == [CHUNK_BYTES] * 4


def test_the_engines_copy_in_small_pieces() -> None:
    made = Made(max_copy_bytes=3, min_engine_bytes=0)
    made.transfer.gather([chunk(0)], [made.buffer(0)])
    made.transfer.scatter([chunk(1)], [made.buffer(1)])
    assert made.store_stream.engine_copies == made.load_stream.engine_copies == [3, 3, 2]
    made.device.run_all()
    assert (made.layer[1].flatten()[:CHUNK_BYTES].numpy() == made.pool.array[1]).all()


def test_a_full_ring_submits_nothing_and_has_room_again_as_copies_end(made: Made) -> None:
    handles = [made.transfer.gather([chunk(block)], [made.buffer(block)]) for block in range(4)]
    kernels = made.device.compute.kernels
    assert made.transfer.gather([chunk(4)], [made.buffer(4)]) is None
    assert made.device.compute.kernels == kernels and made.transfer.num_free == 0
    made.device.run_all()
    assert made.transfer.gather([chunk(4)], [made.buffer(4)]) is None, "before the end was heard of"
    assert [finished.handle for finished in made.transfer.poll()] == handles
    assert made.transfer.gather([chunk(4)], [made.buffer(4)]) is not None
    assert made.transfer.gather([chunk(5)] * 97, [made.buffer(0)] * 97) is None, "776 bytes, in 256s"
    assert made.transfer.num_free == 768


def test_a_store_that_is_larger_than_the_ring_never_fits() -> None:
    made = Made(ring_bytes=128)
    assert made.transfer.gather([chunk(0)], [made.buffer(0)]) is None


# Loads.


def test_a_load_leaves_the_compute_stream_alone(made: Made) -> None:
    made.transfer.scatter([chunk(3)], [made.buffer(5)], [Span(0, 3, TOKENS, TOKENS)])
    made.device.compute.advance()
    assert made.device.compute.kernels == 0 and not made.device.compute.can_advance


@pytest.mark.parametrize(("min_engine_bytes", "kernels", "copies"), [(8, 0, [8]), (9, 1, [])])
def test_short_pieces_are_the_kernels(min_engine_bytes: int, kernels: int, copies: list[int]) -> None:
    made = Made(min_engine_bytes=min_engine_bytes)
    made.transfer.scatter([chunk(3)], [made.buffer(5)])
    assert (made.load_stream.kernels, made.load_stream.engine_copies) == (kernels, copies)


def test_pages_in_another_order_are_the_kernels_however_long_the_piece() -> None:
    """Two heads, each with its tokens one after the other: two copies of four rows."""
    made = Made(num_heads=2, min_engine_bytes=1)
    made.transfer.scatter([chunk(3)], [made.buffer(5)])
    assert (made.load_stream.kernels, made.load_stream.engine_copies) == (1, [])


def test_the_kernel_reads_no_host_memory_that_is_not_pinned() -> None:
    made = Made(num_heads=2, host_is_pinned=False)
    handle = made.transfer.scatter([chunk(3)], [made.buffer(5)])
    assert (made.load_stream.kernels, made.load_stream.engine_copies) == (0, [1] * CHUNK_BYTES)
    made.device.run_all()
    assert made.transfer.poll() == [FinishedCopy(handle)]
    assert (made.layer[3, :, :TOKENS].transpose(0, 1).flatten().numpy() == made.pool.array[5]).all()


def test_a_load_of_nothing_but_zeros_ends_too(made: Made) -> None:
    made.fill(1, 9)
    handle = made.transfer.scatter([], [], [Span(0, 1, 2, 6)])
    made.device.run_all()
    assert made.transfer.poll() == [FinishedCopy(handle)]
    assert made.layer[1].flatten().tolist() == [9] * 4 + [0] * 12


# Errors.


def test_what_cannot_be_copied_fails_alone(made: Made) -> None:
    bad = made.transfer.gather([chunk(99)], [made.buffer(0)])
    good = made.transfer.gather([chunk(1)], [made.buffer(1)])
    worse = made.transfer.scatter([chunk(1)], [made.pool.buffer((0, 1), 9)])
    made.device.run_all()
    errors = {finished.handle: type(finished.error) for finished in made.transfer.poll()}
    assert errors == {bad: IndexError, good: type(None), worse: ValueError}
    assert made.transfer.num_free == 1024


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_a_copy_that_fails_half_way_ends_after_what_it_had_submitted(
    made: Made, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks and its place in the ring are in use until then."""

    run = FakeStream.run

    def refuse(self: FakeStream, table: CopyTable, *, only_clear: bool = False, **_: bool) -> None:
        if way == "scatter" and not only_clear:
            return run(self, table)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(FakeStream, "copy" if way == "gather" else "run", refuse)
    handle = getattr(made.transfer, way)(
        [chunk(2)], [made.buffer(0)], *([] if way == "gather" else [[Span(0, 2, TOKENS, TOKENS)]])
    )
    monkeypatch.undo()
    for stream in (made.store_stream, made.load_stream):
        while stream.can_advance:
            stream.advance()
    assert made.transfer.poll() == []
    made.device.run_all()
    (finished,) = made.transfer.poll()
    assert finished.handle == handle and "out of memory" in str(finished.error)
    assert made.transfer.num_free == 1024


def test_a_kernel_that_is_refused_after_its_launch_is_waited_for(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error can come when the work is submitted already: the ring is in use until that has run."""
    run = made.device.compute.run

    def run_and_raise(table: CopyTable) -> None:
        run(table)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made.device.compute, "run", run_and_raise)
    made.transfer.gather([chunk(2)], [made.buffer(0)])
    while made.store_stream.can_advance:
        made.store_stream.advance()
    assert made.transfer.poll() == []
    made.device.run_all()
    assert len(made.transfer.poll()) == 1 and made.transfer.num_free == 1024


def test_a_lost_device_ends_everything_and_raises_nothing(made: Made) -> None:
    handles = {made.transfer.gather([chunk(0)], [made.buffer(0)]), made.transfer.scatter([chunk(1)], [made.buffer(1)])}
    made.device.lose()
    handles.add(made.transfer.scatter([chunk(2)], [made.buffer(2)]))
    assert made.transfer.gather([chunk(3)], [made.buffer(3)]) is None
    finished = made.transfer.poll()
    assert {copy.handle for copy in finished} == handles and len(finished) == 3
    assert all(isinstance(copy.error, DeviceError) for copy in finished)
    assert made.transfer.poll() == [] and made.transfer.close(0.0)


# Shutdown.


def test_closing_waits_no_longer_than_it_is_told(made: Made) -> None:
    handle = made.transfer.scatter([chunk(1)], [made.buffer(1)])
    assert not made.transfer.close(0.01)
    made.device.run_all()
    assert made.transfer.close(0.0)
    assert made.transfer.poll() == [FinishedCopy(handle)]


def test_closing_hears_of_what_ends_meanwhile(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.transfer.gather([chunk(1)], [made.buffer(1)])
    made.transfer.scatter([chunk(2)], [made.buffer(2)])
    monkeypatch.setattr(time, "sleep", lambda _: made.device.run_all())
    assert made.transfer.close(60.0)
    assert len(made.transfer.poll()) == 2
