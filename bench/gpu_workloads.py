# SPDX-License-Identifier: Apache-2.0
"""KV caches as vLLM 0.32.0 lays them out on CUDA, and the objects that a tier would move. Needs torch alone."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_overlay.tiers.memory import HostBuffer, HostPool, unit_size, units_needed
from vllm_overlay.transfer.base import Placement, Span
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import CellMap

ATTENTION, STATES = 0, 1
LAYOUTS = ("LBNHC", "LBHNC")
"""Token by token (vLLM's default on CUDA), and head by head (FlashInfer on SM100; beside an OffloadingConnector)."""

Groups = Mapping[int, GroupTensors]


@dataclass(frozen=True, slots=True)
class Model:
    """What one GPU holds of a model. A cell is the key and the value of one token and head, in bytes."""

    name: str
    block_tokens: int
    layers: int
    heads: int
    cell_bytes: int
    state_layers: int = 0
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * self.cell_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer. A state's page is as large, with padding behind the state."""
        return self.block_tokens * self.heads * self.cell_bytes


QWEN = Model("Qwen3.5-35B-A3B", 1056, layers=10, heads=2, cell_bytes=1024, state_layers=30, state_bytes=2_146_304)
LLAMA = Model("Llama-3.1-8B", 16, layers=32, heads=8, cell_bytes=512)


def kv_cache(model: Model, layout: str, num_blocks: int, device: torch.device) -> Groups:
    """Layer by layer, each in the nominal shape (blocks, heads, tokens, cell) over its layout; then the states."""
    shape = (model.layers, num_blocks, model.block_tokens, model.heads, model.cell_bytes)
    if layout == "LBNHC":
        memory = torch.zeros(shape, dtype=torch.uint8, device=device).transpose(2, 3)
    else:
        memory = torch.zeros((*shape[:2], shape[3], shape[2], shape[4]), dtype=torch.uint8, device=device)
    groups = {ATTENTION: GroupTensors(tuple(memory), CellMap())}
    if model.state_layers:
        pages = torch.zeros((model.state_layers, num_blocks, model.page_bytes), dtype=torch.uint8, device=device)
        groups[STATES] = GroupTensors(tuple(pages[:, :, : model.state_bytes]))
    return groups


@dataclass(frozen=True, slots=True)
class Workload:
    """Objects that one step stores or loads, and pairs of blocks: ``placements`` use the first of each,
    ``elsewhere`` the second."""

    name: str
    placements: tuple[Placement, ...]
    elsewhere: tuple[Placement, ...]
    object_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.placements) * self.object_bytes


def chunks(model: Model, chunk_tokens: int, num_blocks: int, seed: int = 0) -> Workload:
    """All chunks of half of the blocks, block by block. Blocks come in any order. What a block has left is left out."""

    def placed(blocks: list[int]) -> tuple[Placement, ...]:
        starts = range(0, model.block_tokens, chunk_tokens)
        spans = [
            Span(ATTENTION, block, start, min(chunk_tokens, model.block_tokens - start))
            for block in blocks
            for start in starts
        ]
        return tuple(Placement(spans=(span,)) for span in spans if span.num_tokens == chunk_tokens)

    first, second = _halves(num_blocks, seed)
    name = f"chunks of {chunk_tokens} tokens"
    return Workload(name, placed(first), placed(second), chunk_tokens * model.token_bytes)


def snapshots(model: Model, num_blocks: int, seed: int = 0) -> Workload:
    """The states of all layers, in a quarter of the blocks."""
    first, second = (half[: max(1, len(half) // 2)] for half in _halves(num_blocks, seed))
    placed = [tuple(Placement(((STATES, block),)) for block in blocks) for blocks in (first, second)]
    return Workload("snapshots", placed[0], placed[1], model.state_layers * model.state_bytes)


def _halves(num_blocks: int, seed: int) -> tuple[list[int], list[int]]:
    blocks = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return blocks[: num_blocks // 2], blocks[num_blocks // 2 :]


def host_pool(workload: Workload) -> tuple[HostPool, list[HostBuffer]]:
    """Memory for the objects, in units as the tiers cut it, in any order."""
    unit_bytes = unit_size(workload.object_bytes)
    needed = units_needed(workload.object_bytes, unit_bytes)
    pool = HostPool(needed * len(workload.placements), unit_bytes)
    units = np.random.default_rng(1).permutation(pool.num_units).reshape(-1, needed).tolist()
    return pool, [pool.buffer(own, workload.object_bytes) for own in units]


def object_bytes(groups: Groups, placement: Placement) -> torch.Tensor:
    """An object's bytes by plain indexing: what the copy engine must bring."""
    pieces = [layer[block] for group_id, block in placement.pages for layer in groups[group_id].layers]
    for span in placement.spans:
        for layer in groups[span.group_id].layers:
            tokens = layer[span.block_id, :, span.offset : span.offset + span.num_tokens]
            pieces.append(tokens.transpose(0, 1))
    return torch.cat([piece.flatten() for piece in pieces])
