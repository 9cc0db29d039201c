# SPDX-License-Identifier: Apache-2.0
"""Counts tokens: every token that an admitted request asks for is restored, or is lost for one reason."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_overlay.common.reasons import Reason
from vllm_overlay.tally import Tally


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request's latest lookup. ``lost`` has the tokens that are not offered."""

    num_tokens: int
    lost: Mapping[Reason, int]


@dataclass(frozen=True, slots=True)
class _Load:
    asked: _Asked
    num_tokens: int
    started: float


class TokenAccount:
    """Called by the scheduler's half alone.

    A lookup counts when its request is admitted. So one that is repeated for want of blocks counts once. If a load
    begins then, the lookup counts when the load has ended. So at any time::

        queried_tokens == restored_tokens + the sum of lost_tokens over all reasons
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._asked: dict[str, _Asked] = {}
        self._loads: dict[str, _Load] = {}

    def looked_up(self, request_id: str, num_tokens: int, lost: Mapping[Reason, int]) -> None:
        """The answer to a lookup for ``num_tokens`` beyond the device cache. It replaces an earlier answer."""
        self._asked[request_id] = _Asked(num_tokens, lost)

    def forget(self, request_id: str) -> None:
        """The request is over: the answer to its lookup counts no more."""
        self._asked.pop(request_id, None)

    def admitted(self, request_id: str, num_tokens: int) -> bool:
        """The request got its blocks, to load so many tokens. Whether its lookup counts with that: one that has counted
        already, as when vLLM calls once more after a load, does not count again."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return False
        if num_tokens:
            self._loads[request_id] = _Load(asked, num_tokens, time.monotonic())
        else:
            self._count(asked)
        return True

    def load_ended(self, request_id: str, *, failed: bool) -> int:
        """A load has ended, in all ranks or with a failure in one. Returns the tokens of a load that came."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return 0
        if failed:
            self._count(load.asked, num_failed=load.num_tokens)
            return 0
        self._tally.count("restored_requests")
        self._tally.observe("load_seconds", time.monotonic() - load.started)
        self._count(load.asked, num_restored=load.num_tokens)
        return load.num_tokens

    def _count(self, asked: _Asked, *, num_restored: int = 0, num_failed: int = 0) -> None:
        used = num_restored + num_failed
        lost = {
            **asked.lost,
            Reason.NOT_TAKEN: asked.num_tokens - sum(asked.lost.values()) - used,
            Reason.LOAD_FAILED: num_failed,
        }
        self._tally.count("queried_tokens", asked.num_tokens)
        self._tally.count("restored_tokens", num_restored)
        for reason, tokens in lost.items():
            if tokens:
                self._tally.count("lost_tokens", tokens, reason)
