# SPDX-License-Identifier: Apache-2.0
"""Where objects lie in the KV cache, from a request's block tables. Pure."""

from collections.abc import Collection, Mapping, Sequence

from vllm_overlay.planner.geometry import Geometry, Group
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.transfer.base import Placement, Span

NULL_BLOCK = 0
"""vLLM's block that holds nothing: freed by a sliding window, or already in the device cache."""
BlockIds = Sequence[Sequence[int]]
"""A request's blocks: for each KV cache group, by vLLM's id, the block of each N tokens."""


class Placer:
    """Places the objects of one model. Called by the scheduler's half."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._groups = {group.group_id: group for group in geometry.groups}
        self._full: dict[int | None, Group] = {group.group_id: group for group in geometry.full}
        self._splittable = {group.group_id for group in geometry.attention if geometry.is_splittable(group)}

    def is_full(self, planned: PlannedObject) -> bool:
        """Whether ``planned`` is a chunk of full attention, without which no later one can be found."""
        return planned.group_id in self._full

    def to_store(
        self, planned: Sequence[PlannedObject], block_ids: BlockIds, states: Mapping[int, int] | None = None
    ) -> list[Placement | None]:
        """Where each of these objects is to be copied from, or None when a block of it is gone. For a snapshot
        ``states`` has the block that vLLM offers for each recurrent group."""
        found = self._find(planned, block_ids, states)
        return [None if NULL_BLOCK in blocks else placement for placement, blocks in found]

    def to_load(self, planned: Sequence[PlannedObject], block_ids: BlockIds) -> list[Placement]:
        """Where each of these objects is to be copied to. A snapshot goes to the block that vLLM allocated for its
        boundary."""
        return [placement for placement, _ in self._find(planned, block_ids, None)]

    def _find(
        self, planned: Sequence[PlannedObject], block_ids: BlockIds, states: Mapping[int, int] | None
    ) -> list[tuple[Placement, Collection[int]]]:
        """With the blocks that each touches."""
        found: list[tuple[Placement, Collection[int]]] = []
        for item in planned:
            group_id, start = item.group_id, item.start_tokens
            if group_id is None:
                placement = self._snapshot(item, block_ids, states)
                found.append((placement, placement.block_ids))
                continue
            # As ``block_at``: a prompt has hundreds of chunks.
            blocks, block_size = block_ids[group_id], self._groups[group_id].block_size
            index = start // block_size
            block_id = blocks[index] if index < len(blocks) else NULL_BLOCK
            if group_id in self._splittable:
                placement = Placement((), (Span(group_id, block_id, start % block_size, item.end_tokens - start),))
            else:
                placement = Placement(((group_id, block_id),))
            found.append((placement, (block_id,)))
        return found

    def is_local(self, planned: PlannedObject, block_ids: BlockIds) -> bool:
        """Whether the device cache has this attention already: the request's table has the null block there."""
        group = self._full.get(planned.group_id)
        return group is not None and block_at(block_ids, group, planned.start_tokens) == NULL_BLOCK

    def beyond(self, restore_point: int, block_ids: BlockIds) -> tuple[Span, ...]:
        """The rest of the last attention block of each group, to be cleared. vLLM does not clear what a connector says
        it loads."""
        spans = []
        for group in self._geometry.attention:
            offset = restore_point % group.block_size
            if offset and self._geometry.is_splittable(group):
                block_id = block_at(block_ids, group, restore_point)
                spans.append(Span(group.group_id, block_id, offset, group.block_size - offset))
        return tuple(spans)

    def _snapshot(self, planned: PlannedObject, block_ids: BlockIds, states: Mapping[int, int] | None) -> Placement:
        last = planned.end_tokens - 1
        pages = tuple(
            [
                (group.group_id, states[group.group_id] if states else block_at(block_ids, group, last))
                for group in self._geometry.recurrent
            ]
        )
        start, tail = planned.start_tokens, planned.end_tokens - planned.start_tokens
        groups = [group for group in self._geometry.attention if tail and self._geometry.is_splittable(group)]
        spans = [Span(one.group_id, block_at(block_ids, one, start), start % one.block_size, tail) for one in groups]
        return Placement(pages, tuple(spans))


def block_at(block_ids: BlockIds, group: Group, token: int) -> int:
    """The block that holds ``token``; ``NULL_BLOCK`` when the request's table does not reach it."""
    blocks, index = block_ids[group.group_id], token // group.block_size
    return blocks[index] if index < len(blocks) else NULL_BLOCK
