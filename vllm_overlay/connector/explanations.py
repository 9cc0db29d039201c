# SPDX-License-Identifier: Apache-2.0
"""Why a request was not restored, in the log: what counters can only say of all requests together."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.planner import Lookup

if TYPE_CHECKING:
    from vllm.v1.request import Request

_STORED_ONCE = (Reason.WINDOW, Reason.STATE, Reason.EVICTED)
"""From the restore point up (``lost_tokens``): the tier has or had the attention of these tokens."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Lost:
    request: "Request"
    num_found: int
    lookup: Lookup

    def computed(self) -> dict[Reason, int]:
        """What of it the first step computes: another connector may have loaded more than this one offered."""
        found = {}
        start = self.num_found
        for reason in _STORED_ONCE:
            end = start + self.lookup.lost.get(reason, 0)
            if tokens := end - max(start, min(end, self.request.num_computed_tokens)):
                found[reason] = tokens
            start = end
        return found


class Explanations:
    """Called by the scheduler's half alone. One line at debug level an answer, and one at info for a request that
    computes at least ``min_tokens`` which the tier had once; 0: none."""

    def __init__(self, name: str, min_tokens: int) -> None:
        """``name`` is the connector's."""
        self._name = name
        self._min_tokens = min_tokens
        self._waiting: dict[str, _Lost] = {}
        """Requests that were in no step yet."""

    def looked_up(self, request: "Request", num_local: int, lookup: Lookup) -> None:
        """The answer to a lookup; it replaces an earlier one."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%s: request %s: %d of %d tokens on the device, %d more to restore; then %s%s; not restored: %s",
                self._name, request.request_id, num_local, request.num_tokens, lookup.num_new_tokens,
                lookup.limited_by, _group(lookup), _words(lookup.lost),
            )  # fmt: skip
        self._waiting.pop(request.request_id, None)
        if self._min_tokens and sum(lookup.lost.get(reason, 0) for reason in _STORED_ONCE) >= self._min_tokens:
            found = max(num_local, lookup.restore_point)
            self._waiting[request.request_id] = _Lost(request, found, lookup)

    def not_asked(self, request: "Request", num_local: int, why: Reason) -> None:
        """The tier was not asked at all. That replaces an earlier answer."""
        logger.debug(
            "%s: request %s: %d of %d tokens on the device, the tier is not asked: %s",
            self._name, request.request_id, num_local, request.num_tokens, why,
        )  # fmt: skip
        self._waiting.pop(request.request_id, None)

    def step(self, scheduled: Iterable[str]) -> None:
        """Called before a step that computes these requests."""
        for request_id in scheduled if self._waiting else ():
            lost = self._waiting.pop(request_id, None)
            if lost is not None and sum((computed := lost.computed()).values()) >= self._min_tokens:
                logger.info(
                    "%s: request %s computes tokens that were stored once: %s%s",
                    self._name, request_id, _words(computed), _group(lost.lookup),
                )  # fmt: skip

    def finished(self, request_id: str) -> None:
        """The request is over."""
        self._waiting.pop(request_id, None)


def _words(tokens: dict[Reason, int]) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in tokens.items()) or "nothing"


def _group(lookup: Lookup) -> str:
    return "" if lookup.limiting_group_id is None else f" (group {lookup.limiting_group_id})"
