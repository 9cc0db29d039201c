# SPDX-License-Identifier: Apache-2.0
"""Which objects a step stores: chunks that it completes, and states at the boundaries that vLLM offers or passes by."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector.metadata import StoreJob
from vllm_overlay.connector.pending import PendingReports
from vllm_overlay.connector.placement import BlockIds, Placer
from vllm_overlay.connector.requests import StoreCursor, TrackedRequest
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import TierManager
from vllm_overlay.transfer.base import Placement

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState


class StorePlanner:
    """Called by the scheduler's half, once a step."""

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        placer: Placer,
        tier: TierManager,
        pending: PendingReports,
        tally: Tally,
        *,
        stores_decoded_tokens: bool,
        speculative_snapshot_tokens: int,
    ) -> None:
        """``pending`` gets the tickets that go out. ``speculative_snapshot_tokens``: 0 for no such snapshots."""
        self._geometry = planner.geometry
        self._planner = planner
        self._placer = placer
        self._tier = tier
        self._pending = pending
        self._tally = tally
        self._stores_decoded_tokens = stores_decoded_tokens
        self._speculative_snapshot_tokens = speculative_snapshot_tokens if self._geometry.recurrent else 0
        self._step = 0

    def plan(
        self,
        step: int,
        requests: Mapping[str, TrackedRequest],
        storing: dict[str, TrackedRequest],
        num_scheduled_tokens: Mapping[str, int],
        block_state: "KVConnectorBlockState",
    ) -> list[StoreJob]:
        """The stores of the scheduler's step of this number. When it raises, tickets may be out: see ``pending``.

        ``storing``: those of ``requests`` that may have chunks to store. Who has none left is taken out after its first
        output token.
        """
        self._step = step
        jobs: list[StoreJob] = []
        for request_id, tracked in list(storing.items()) if storing else ():
            num_tokens = num_scheduled_tokens.get(request_id)
            if num_tokens is None or tracked.names.keys is None:
                continue
            num_computed = tracked.request.num_computed_tokens
            if num_computed + num_tokens >= tracked.next_chunk_tokens:
                jobs += self._chunks(tracked, tracked.names.keys, num_tokens, block_state)
            if self._speculative_snapshot_tokens and num_computed < tracked.num_prompt_tokens:
                jobs += self._speculative_snapshot(tracked, tracked.names.keys, num_tokens, block_state)
            elif tracked.next_chunk_tokens == math.inf and tracked.request.num_output_tokens:
                del storing[request_id]
        for request_id, offers in block_state.boundary_state_offloads.items():
            offered = requests.get(request_id)
            block_ids = block_state.get_block_ids(request_id)
            if offered is not None and offered.names.keys is not None and block_ids is not None:
                jobs += self._offered_snapshots(offered, offered.names.keys, offers, block_ids)
        return jobs

    def _storable_tokens(self, tracked: TrackedRequest) -> int:
        """Tokens of a request that may be stored: those of the prompt alone where decode steps must not write what is
        stored.

        Decode steps round otherwise than a prefill. The next turn prefills the answer and stores it then. A model with
        states loses no hit: unless it is told to, vLLM offers none of the states that decode steps go through. The next
        turn begins at the prompt's last state in any case.
        """
        return tracked.request.num_tokens if self._stores_decoded_tokens else tracked.num_prompt_tokens

    # Chunks.

    def _chunks(
        self, tracked: TrackedRequest, keys: Sequence[bytes], num_tokens: int, block_state: "KVConnectorBlockState"
    ) -> list[StoreJob]:
        computed = min(tracked.request.num_computed_tokens + num_tokens, self._storable_tokens(tracked))
        tracked.find_next_chunk(self._geometry, math.inf if self._stores_decoded_tokens else tracked.num_prompt_tokens)
        ready = {group_id for group_id, cursor in tracked.cursors.items() if cursor.may_store(self._step)}
        if computed < tracked.next_chunk_tokens or not ready:
            return []
        block_ids = block_state.get_block_ids(tracked.request.request_id)
        if block_ids is None:
            return []
        if not tracked.is_retrying:
            self._skip_held(tracked, keys, computed, ready)
        positions = {
            group_id: cursor.tokens if group_id in ready else computed for group_id, cursor in tracked.cursors.items()
        }
        chunks = self._planner.store_plan(keys, positions, computed)
        stalled: set[int | None] = set()
        if not tracked.is_retrying and tracked.stalled_at not in [chunk.object_id for chunk in chunks]:
            return self._chunks_at_once(tracked, keys, chunks, block_ids, stalled)
        jobs: list[StoreJob] = []
        cursors: Mapping[Any, StoreCursor] = tracked.cursors
        for chunk in chunks:
            if chunk.group_id not in stalled and cursors[chunk.group_id].may_store(self._step):
                jobs += self._chunks_at_once(tracked, keys, [chunk], block_ids, stalled)
        return jobs

    def _skip_held(self, tracked: TrackedRequest, keys: Sequence[bytes], computed: int, ready: Collection[int]) -> None:
        """Passes by the next chunks of full attention that the tier has: of a prompt that was restored, most."""
        for group in self._geometry.full:
            if group.group_id not in ready:
                continue
            cursor, size = tracked.cursors[group.group_id], self._geometry.chunk_size_of(group)
            first = -(-cursor.tokens // size)
            end = min(computed, len(keys) * self._geometry.match_unit) // size
            names = self._geometry.chunk_ids(keys, group, range(first, end))
            if num_held := self._tier.num_held(names):
                cursor.skip(names[:num_held], (first + num_held) * size, self._tier)

    def _chunks_at_once(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        chunks: Sequence[PlannedObject],
        block_ids: BlockIds,
        stalled: set[int | None],
    ) -> list[StoreJob]:
        """Asks the tier once for the tickets of ``chunks``.

        Groups of full attention whose chunk finds no room go into ``stalled``: the chunk is tried again. While the
        prompt is computed that is in each step: what comes with its end is stored only then. A window's chunk is not:
        its block may be gone in the next step, and later chunks do without.
        """
        tier, placer = self._tier, self._placer
        cursors: Mapping[Any, StoreCursor] = tracked.cursors
        unwanted: set[ObjectId] = set()
        for group_id, cursor in tracked.cursors.items():
            unwanted.update(cursor.unwanted([chunk for chunk in chunks if chunk.group_id == group_id], tier))
        wanted = [chunk for chunk in chunks if chunk.object_id not in unwanted]
        found = placer.to_store(wanted, block_ids)
        placements = {chunk.object_id: placement for chunk, placement in zip(wanted, found, strict=True)}
        jobs = self._reserve(tracked, wanted, found)
        stored = {job.ticket.planned.object_id for job in jobs}
        for chunk in chunks:
            name, cursor = chunk.object_id, cursors[chunk.group_id]
            if chunk.group_id in stalled:
                continue
            if name in stored:
                cursor.submitted(chunk)
            elif name not in placements:
                cursor.tokens = chunk.end_tokens
            elif tier.has_or_awaits(name):
                cursor.passed(chunk)
            else:
                if placements[name] is not None:
                    self._count_no_room(tracked, chunk)
                if placer.is_full(chunk):
                    stalled.add(chunk.group_id)
                    cursor.go_back(self._planner.first_missing(keys, chunk, tier.has_or_awaits))
                    if tracked.request.num_computed_tokens >= tracked.num_prompt_tokens:
                        cursor.wait(self._step)
                else:
                    cursor.passed(chunk)
        return jobs

    # Snapshots.

    def _offered_snapshots(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        offers: Sequence[tuple[int, int, int]],
        block_ids: BlockIds,
    ) -> list[StoreJob]:
        pages: dict[int, dict[int, int]] = {}
        for group_id, block_id, boundary in offers:
            pages.setdefault(boundary, {})[group_id] = block_id
        wanted = {group.group_id for group in self._geometry.recurrent}
        jobs = []
        for boundary, states in pages.items():
            known = min(len(keys) * self._geometry.match_unit, self._storable_tokens(tracked))
            if set(states) != wanted or boundary > known or not self._geometry.is_restore_point(boundary):
                continue
            tracked.state_tokens = boundary
            jobs += self._snapshot(tracked, keys, boundary, block_ids, states)
        return jobs

    def _speculative_snapshot(
        self, tracked: TrackedRequest, keys: Sequence[bytes], num_tokens: int, block_state: "KVConnectorBlockState"
    ) -> list[StoreJob]:
        """The state where this step of ``num_tokens`` ends inside a prompt, far enough after the last that is kept.

        vLLM neither keeps nor offers it. It is in the block of the step's last token, from which the next step goes on.
        With speculative decoding a group has more blocks behind that one.
        """
        boundary = tracked.request.num_computed_tokens + num_tokens
        if tracked.state_tokens is None:
            tracked.state_tokens = tracked.request.num_computed_tokens
        if boundary - tracked.state_tokens < self._speculative_snapshot_tokens:
            return []
        known = min(tracked.num_prompt_tokens - 1, len(keys) * self._geometry.match_unit)
        last = self._geometry.floor_to_restore_point(known)
        block_ids = block_state.get_block_ids(tracked.request.request_id)
        if boundary >= last or block_ids is None or not self._geometry.is_restore_point(boundary):
            return []
        tracked.state_tokens = boundary
        return self._snapshot(tracked, keys, boundary, block_ids)

    def _snapshot(
        self,
        tracked: TrackedRequest,
        keys: Sequence[bytes],
        boundary: int,
        block_ids: BlockIds,
        states: Mapping[int, int] | None = None,
    ) -> list[StoreJob]:
        """``states``: see ``Placer.to_store``."""
        snapshot = self._planner.snapshot(keys, boundary)
        if self._tier.unwanted([snapshot.object_id]):
            return []
        placements = self._placer.to_store([snapshot], block_ids, states)
        jobs = self._reserve(tracked, [snapshot], placements)
        if None not in placements and not jobs and not self._tier.has_or_awaits(snapshot.object_id):
            self._count_no_room(tracked, snapshot)
        return jobs

    # Both.

    def _reserve(
        self, tracked: TrackedRequest, planned: Sequence[PlannedObject], placements: Iterable[Placement | None]
    ) -> list[StoreJob]:
        """Jobs for those that have a placement and get a ticket."""
        placed = [(item, where) for item, where in zip(planned, placements, strict=True) if where is not None]
        tickets = self._tier.reserve_all([item for item, _ in placed])
        weights = tracked.names.weights
        jobs = [
            StoreJob(ticket, where, weights)
            for ticket, (_, where) in zip(tickets, placed, strict=True)
            if ticket is not None
        ]
        self._pending.add_stores(tracked.request.request_id, [job.ticket for job in jobs])
        return jobs

    def _count_no_room(self, tracked: TrackedRequest, planned: PlannedObject) -> None:
        """Once for an object that is tried again and again."""
        if tracked.stalled_at != planned.object_id:
            tracked.stalled_at = planned.object_id
            self._tally.count("dropped_stores", label=Reason.NO_ROOM)
