# SPDX-License-Identifier: Apache-2.0
"""CudaTransfer beside an engine that computes on: the bytes are right in every order that the streams allow.

The machine keeps two KV caches. The real one changes as late as the fake device lets it; the expected one changes at
once, in the order of submission.
"""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.transfer import naive
from tests.transfer.fake_device import DeviceError, FakeDevice
from tests.transfer.naive import NUM_BLOCKS, memory_of
from vllm_overlay.tiers.memory import HostBuffer, HostPool, UnitAllocator, units_needed
from vllm_overlay.transfer.base import FinishedCopy, Handle, Placement, Span
from vllm_overlay.transfer.cuda import CudaTransfer
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import CellMap

BLOCK, HEADS, CELL = 8, 2, 6
UNIT_BYTES = 100
RING_BYTES = 2048
MAX_COPY_BYTES = 40
MIN_ENGINE_BYTES = 30

Groups = dict[int, GroupTensors]


def kv_cache() -> Groups:
    """A layer that the engines can load (LBNHC), one that needs the kernel (LBHNC), and a state."""
    rows = naive.strided((NUM_BLOCKS, HEADS, BLOCK, CELL), [1, 2, 0], torch.uint8, 0)
    heads = naive.strided((NUM_BLOCKS, HEADS, BLOCK, CELL), [2, 1, 0], torch.uint8, 0)
    return {0: GroupTensors((rows, heads), CellMap()), 1: GroupTensors((naive.padded((35,), torch.uint8, 3),))}


@dataclass
class Store:
    buffers: list[HostBuffer]
    expected: list[np.ndarray]


@dataclass
class Load:
    placements: list[Placement]
    buffers: list[HostBuffer]
    zeros: list[Span]


@st.composite
def placements_in(draw: st.DrawFn, free: list[int]) -> list[Placement]:
    """Chunks and snapshots in some of these blocks."""
    found = []
    for block in draw(st.lists(st.sampled_from(free), min_size=1, max_size=3, unique=True)):
        start = draw(st.integers(0, BLOCK - 1))
        span = Span(0, block, start, draw(st.integers(1, BLOCK - start)))
        found.append(draw(st.sampled_from([Placement(spans=(span,)), Placement(((1, block),), (span,))])))
    return found


class Machine(RuleBasedStateMachine):
    host_is_pinned = True

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice()
        self.real, self.expected = kv_cache(), kv_cache()
        naive.randomize(self.real, seed=1)
        naive.randomize(self.expected, seed=1)
        self.transfer = CudaTransfer(
            self.real,
            self.device,
            ring_bytes=RING_BYTES,
            host_is_pinned=self.host_is_pinned,
            max_copy_bytes=MAX_COPY_BYTES,
            min_engine_bytes=MIN_ENGINE_BYTES,
        )
        self.pool = HostPool(16, UNIT_BYTES)
        self.units = UnitAllocator(self.pool.num_units)
        self.random = np.random.default_rng(2)
        self.stores: dict[Handle, Store] = {}
        self.loads: dict[Handle, Load] = {}
        self.loading: set[int] = set()
        """Blocks that belong to loads under way."""

    @initialize()
    def a_pool_of_anything(self) -> None:
        self.poison(range(self.pool.num_units))

    def poison(self, units: range | tuple[int, ...]) -> None:
        for unit in units:
            self.pool.array[unit] = self.random.integers(0, 256, UNIT_BYTES)

    def buffers(self, placements: list[Placement]) -> list[HostBuffer]:
        """As many as there are units for."""
        found = []
        for placement in placements:
            size = naive.num_bytes_of(self.real, placement)
            if (units := self.units.allocate(units_needed(size, UNIT_BYTES))) is None:
                break
            found.append(self.pool.buffer(units, size))
        return found

    def give_back(self, buffers: list[HostBuffer]) -> None:
        """Whoever gets the units next writes to them at once."""
        for buffer in buffers:
            self.poison(buffer.units)
            self.units.free(buffer.units)

    @property
    def free_blocks(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if block not in self.loading]

    @rule(data=st.data())
    @precondition(lambda self: self.free_blocks and self.device.error is None)
    def the_engine_computes(self, data: st.DataObject) -> None:
        self.compute(data.draw(st.sampled_from(self.free_blocks)))

    def compute(self, block: int) -> None:
        """A step writes to all of a block."""
        seed = int(self.random.integers(1 << 30))
        self.device.compute.submit(lambda: fill(self.real, block, seed))
        fill(self.expected, block, seed)

    @rule(data=st.data())
    @precondition(lambda self: self.free_blocks)
    def store(self, data: st.DataObject) -> None:
        placements = data.draw(placements_in(self.free_blocks))
        buffers = self.buffers(placements)
        if not buffers:
            return
        placements = placements[: len(buffers)]
        handle = self.transfer.gather(placements, buffers)
        if handle is None:
            assert self.device.error is not None or self.transfer.num_free < RING_BYTES
            self.give_back(buffers)
        else:
            expected = [naive.gathered(self.expected, placement) for placement in placements]
            self.stores[handle] = Store(buffers, expected)

    @rule(data=st.data())
    @precondition(lambda self: self.free_blocks)
    def load(self, data: st.DataObject) -> None:
        """What a tier has read, and what is to be clear behind it; often into blocks that a step still writes to."""
        placements = data.draw(placements_in(self.free_blocks))
        buffers = self.buffers(placements)
        placements = placements[: len(buffers)]
        for buffer in buffers:
            self.poison(buffer.units)
        zeros = [
            Span(0, span.block_id, span.offset + span.num_tokens, BLOCK - span.offset - span.num_tokens)
            for placement in placements
            for span in placement.spans
            if span.offset + span.num_tokens < BLOCK
        ]
        blocks = {block for placement in placements for block in placement.block_ids}
        if self.device.error is None and data.draw(st.booleans()):
            for block in blocks:
                self.compute(block)
        self.loading |= blocks
        handle = self.transfer.scatter(placements, buffers, zeros)
        self.loads[handle] = Load(placements, buffers, zeros)
        for placement, buffer in zip(placements, buffers, strict=True):
            naive.scatter(self.expected, placement, naive.bytes_of(buffer))
        for span in zeros:
            for memory, indices in naive.pieces(self.expected, Placement(spans=(span,))):
                memory[indices] = 0

    @rule(stream=st.integers(0, 2), choices=st.lists(st.integers(0, 50), min_size=1, max_size=30))
    def the_device_runs(self, stream: int, choices: list[int]) -> None:
        for choice in choices:
            if self.device.error is None and self.device.streams[stream].can_advance:
                self.device.streams[stream].advance(choice)

    @rule()
    def poll(self) -> None:
        for finished in self.transfer.poll():
            if finished.handle in self.stores:
                self.end_store(finished, self.stores.pop(finished.handle))
            else:
                self.end_load(finished, self.loads.pop(finished.handle))

    def end_store(self, finished: FinishedCopy, store: Store) -> None:
        if finished.error is None:
            for buffer, expected in zip(store.buffers, store.expected, strict=True):
                assert (naive.bytes_of(buffer) == expected).all()
        else:
            assert isinstance(finished.error, DeviceError)
        self.give_back(store.buffers)

    def end_load(self, finished: FinishedCopy, load: Load) -> None:
        if finished.error is None:
            cleared = [Placement(spans=(span,)) for span in load.zeros]
            for placement in [*load.placements, *cleared]:
                assert (naive.gathered(self.real, placement) == naive.gathered(self.expected, placement)).all()
        else:
            assert isinstance(finished.error, DeviceError)
        self.loading -= {block for placement in load.placements for block in placement.block_ids}
        self.give_back(load.buffers)

    @rule()
    @precondition(lambda self: self.device.error is None and len(self.stores) + len(self.loads) > 1)
    def the_device_is_lost(self) -> None:
        self.device.lose()

    @invariant()
    def the_ring_is_never_overdrawn(self) -> None:
        assert 0 <= self.transfer.num_free <= RING_BYTES

    def teardown(self) -> None:
        """Everything ends, and ends once; the ring is empty; the KV cache is what it should be."""
        if self.device.error is None:
            self.device.run_all()
        assert self.transfer.close(10.0)
        self.poll()
        assert not self.stores and not self.loads and self.transfer.poll() == []
        if self.device.error is None:
            assert self.transfer.num_free == RING_BYTES
            pairs = zip(naive.snapshot_of(self.real), naive.snapshot_of(self.expected), strict=True)
            assert all((a == b).all() for a, b in pairs)


def fill(groups: Groups, block: int, seed: int) -> None:
    """Random bytes to all of a block's pages."""
    random = np.random.default_rng(seed)
    for group in groups.values():
        for layer in group.layers:
            indices = naive.page_indices(layer, block)
            memory_of(layer)[indices] = random.integers(0, 256, indices.size)


class PageableMachine(Machine):
    """The kernel cannot read host memory."""

    host_is_pinned = False


TestStates = Machine.TestCase
TestStates.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPageableStates = PageableMachine.TestCase
TestPageableStates.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
