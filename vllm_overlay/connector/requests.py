# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half remembers of one request between its first lookup and its end."""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_overlay.connector.lora.keys import RequestNames
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import TierManager

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LONGEST_PAUSE_STEPS = 64


@dataclass(slots=True)
class StoreCursor:
    """How far one attention group of a request was considered for storing: up to ``tokens``.

    After a failed store nothing later can be found. So the cursor goes back to that chunk (``retry``), and nothing
    after it is stored before it is. It is tried in the next step, and after ever more steps while that fails too. So is
    a chunk that found no room.
    """

    tokens: int = 0
    retry: PlannedObject | None = None
    _is_retry_out: bool = False
    _num_failures: int = 0
    _failed_at: int = -1
    _again_at: int = 0
    _has_gone_back: bool = False
    _asked_tokens: int = 0
    _unwanted: set[ObjectId] = field(default_factory=set)

    def may_store(self, step: int) -> bool:
        """Whether the next chunk may be stored in this step."""
        return step >= self._again_at and not self._is_retry_out

    def unwanted(self, chunks: Sequence[PlannedObject], tier: TierManager) -> Collection[ObjectId]:
        """What the tier does not want of these or earlier ones. It is asked once a chunk: to try again is no further
        use."""
        new = [chunk.object_id for chunk in chunks if chunk.end_tokens > self._asked_tokens]
        if new:
            self._asked_tokens = chunks[-1].end_tokens
            self._unwanted.update(tier.unwanted(new))
        return self._unwanted

    def skip(self, object_ids: Sequence[ObjectId], end_tokens: int, tier: TierManager) -> None:
        """The tier has these chunks, the next ones, up to ``end_tokens``. It counts their use."""
        if self._asked_tokens < end_tokens:
            tier.unwanted(object_ids)
        self._asked_tokens = max(self._asked_tokens, end_tokens)
        self.tokens = end_tokens

    def failed(self, chunk: PlannedObject, step: int) -> None:
        """A rank could not store the chunk. Several chunks of one step are one failure."""
        self.tokens = min(self.tokens, chunk.start_tokens)
        if self.retry is None or chunk.start_tokens <= self.retry.start_tokens:
            self.retry, self._is_retry_out = chunk, False
        self.wait(step)

    def wait(self, step: int) -> None:
        """The next chunk could not be stored in this step."""
        if self._failed_at != step:
            self._failed_at = step
            self._num_failures += 1
            self._again_at = step + min(2 ** min(self._num_failures - 1, 16), _LONGEST_PAUSE_STEPS)

    def passed(self, chunk: PlannedObject) -> None:
        """The chunk need not be stored: the tier has it, or awaits it from another request."""
        self.tokens = chunk.end_tokens
        self.stored(chunk)

    def stored(self, chunk: PlannedObject) -> None:
        """Every rank has stored the chunk."""
        if self.retry is not None and self.retry.object_id == chunk.object_id:
            self.retry, self._is_retry_out, self._num_failures, self._again_at = None, False, 0, 0

    def submitted(self, chunk: PlannedObject) -> None:
        """The chunk is on its way. While one is tried again it becomes the one to retry: what came before it may be
        unwanted."""
        self.tokens = chunk.end_tokens
        if self.retry is not None:
            self.retry, self._is_retry_out = chunk, True
        else:
            self._num_failures = 0

    def go_back(self, chunk: PlannedObject) -> None:
        """Chunks from this one on have gone from the tier. Goes back once only. Otherwise a tier that is too small for
        its requests would store and evict the same chunks for ever."""
        if chunk.start_tokens < self.tokens and not self._has_gone_back:
            self._has_gone_back = True
            self.tokens = min(self.tokens, chunk.start_tokens)
            if self.retry is not None:
                self.retry = chunk


@dataclass(slots=True)
class TrackedRequest:
    """One request. ``cursors`` are by vLLM's id of the attention group; a new one is at the beginning of the prompt."""

    request: "Request"
    names: RequestNames
    num_local: int
    num_prompt_tokens: int
    """Tokens of the prompt when the request came. A streaming session later takes what it has decoded into its
    prompt."""
    restore_point: int = 0
    """The answer to its latest lookup. 0: none above ``num_local``."""
    failed_loads: int = 0
    state_tokens: int | None = None
    """Where its last state lies that is kept: it went on from there, or it was to be stored. None: no step yet."""
    cursors: defaultdict[int, StoreCursor] = field(default_factory=lambda: defaultdict(StoreCursor))
    stalled_at: ObjectId | None = None
    """The chunk that got no room. Kept so that it is counted once."""
    next_chunk_tokens: float = 0
    """Before so many tokens are computed it has no chunk to store; none at all while this is infinite."""

    @property
    def is_retrying(self) -> bool:
        """Whether a failed store of some group is to be tried again, or is on its way once more."""
        return any(cursor.retry is not None for cursor in self.cursors.values())

    def find_next_chunk(self, geometry: Geometry, storable_tokens: float) -> None:
        """Sets ``next_chunk_tokens``, from where the cursors are. Of the request ``storable_tokens`` may be stored."""
        ends = [self.cursors[group.group_id].tokens + geometry.chunk_size_of(group) for group in geometry.attention]
        self.next_chunk_tokens = min([end for end in ends if end <= storable_tokens], default=math.inf)
