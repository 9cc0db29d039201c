# SPDX-License-Identifier: Apache-2.0
"""Where objects lie in the KV cache, from a request's block tables. Pure."""

from collections.abc import Mapping, Sequence

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
        self._splittable = {group.group_id for group in geometry.attention if geometry.is_splittable(group)}

    def group_of(self, planned: PlannedObject) -> Group | None:
        """The group that ``planned`` is a chunk of; None for a snapshot."""
        return None if planned.group_id is None else self._groups[planned.group_id]

    def is_full(self, planned: PlannedObject) -> bool:
        """Whether ``planned`` is a chunk of full attention, without which no later one can be found."""
        group = self.group_of(planned)
        return group is not None and group.is_full

    def to_store(
        self, planned: PlannedObject, block_ids: BlockIds, states: Mapping[int, int] | None = None
    ) -> Placement | None:
        """Where an object is to be copied from, or None when a block of it is gone.

        For a snapshot ``states`` has the block that vLLM offers for each recurrent group.
        """
        if planned.group_id is not None:
            group = self._groups[planned.group_id]
            block_id = block_at(block_ids, group, planned.start_tokens)
            return self._chunk(planned, group, block_id) if block_id != NULL_BLOCK else None
        placement = self._snapshot(planned, block_ids, states)
        return None if NULL_BLOCK in placement.block_ids else placement

    def to_load(self, planned: PlannedObject, block_ids: BlockIds) -> Placement:
        """Where an object is to be copied to. A snapshot goes to the block that vLLM allocated for its boundary."""
        if planned.group_id is None:
            return self._snapshot(planned, block_ids, None)
        group = self._groups[planned.group_id]
        return self._chunk(planned, group, block_at(block_ids, group, planned.start_tokens))

    def is_local(self, planned: PlannedObject, block_ids: BlockIds) -> bool:
        """Whether the device cache has this attention already: the request's table has the null block there."""
        group = self.group_of(planned)
        if group is None or not group.is_full:
            return False
        return block_at(block_ids, group, planned.start_tokens) == NULL_BLOCK

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

    def _chunk(self, planned: PlannedObject, group: Group, block_id: int) -> Placement:
        if group.group_id not in self._splittable:
            return Placement(pages=((group.group_id, block_id),))
        start = planned.start_tokens
        return Placement((), (Span(group.group_id, block_id, start % group.block_size, planned.end_tokens - start),))

    def _snapshot(self, planned: PlannedObject, block_ids: BlockIds, states: Mapping[int, int] | None) -> Placement:
        pages = tuple(
            (group.group_id, states[group.group_id] if states else block_at(block_ids, group, planned.end_tokens - 1))
            for group in self._geometry.recurrent
        )
        has_tail = planned.start_tokens < planned.end_tokens
        groups = [group for group in self._geometry.attention if has_tail and self._geometry.is_splittable(group)]
        return Placement(pages, tuple(self._span(planned, group, block_ids) for group in groups))

    def _span(self, planned: PlannedObject, group: Group, block_ids: BlockIds) -> Span:
        start = planned.start_tokens
        block_id = block_at(block_ids, group, start)
        return Span(group.group_id, block_id, start % group.block_size, planned.end_tokens - start)


def block_at(block_ids: BlockIds, group: Group, token: int) -> int:
    """The block that holds ``token``; ``NULL_BLOCK`` when the request's table does not reach it."""
    blocks, index = block_ids[group.group_id], token // group.block_size
    return blocks[index] if index < len(blocks) else NULL_BLOCK
