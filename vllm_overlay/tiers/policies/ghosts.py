# SPDX-License-Identifier: Apache-2.0
"""Restore points that are gone and still watched. Without them eviction would hide the reuses that it prevents."""

from collections.abc import Sequence

import msgspec

from vllm_overlay.tiers.policies.reuse import Role
from vllm_overlay.tiers.policies.runs import Point, Run

NUM_GHOSTS = 8192


class Ghost(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a point that is gone."""

    role: Role
    watch: int
    boundary: int
    turns: int
    hits: int


class Ghosts:
    """The last ``NUM_GHOSTS`` points that went, by their last chunks' keys."""

    def __init__(self) -> None:
        self._ghosts: dict[bytes, Ghost] = {}
        self._passed: dict[Run, Ghost] = {}
        """By the run that is on its way: the deepest ghost that it has passed."""

    def __len__(self) -> int:
        return len(self._ghosts)

    def remember(self, point: Point, key: bytes) -> None:
        """The point goes. Nobody misses a speculative one."""
        if point.role is Role.SPECULATIVE:
            return
        self._ghosts.pop(key, None)
        self._ghosts[key] = Ghost(point.role, point.watch, point.boundary, point.turns, point.hits)
        if len(self._ghosts) > NUM_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]

    def pass_by(self, run: Run, keys: Sequence[bytes]) -> None:
        """The run has grown by the chunks of these keys."""
        for ghost in filter(None, map(self._ghosts.get, keys)):
            self._passed[run] = ghost

    def met_by(self, run: Run) -> Ghost | None:
        """The deepest point that is gone and that the prompt at the end of this run would have used. Given out once."""
        return self._passed.pop(run, None) or self._ghosts.get(run.tail.object_id.key)

    def forget(self, run: Run) -> None:
        """No prompt is on its way there any more."""
        self._passed.pop(run, None)
