# SPDX-License-Identifier: Apache-2.0
"""A request's lookup: every child is asked, the best offer is chosen, and the decision is kept until it is counted."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_overlay.common.reasons import Reason
from vllm_overlay.multi_connector import validation
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.choice import Choice, Verdict
from vllm_overlay.multi_connector.control_file import ControlFile
from vllm_overlay.multi_connector.hooks import logger
from vllm_overlay.multi_connector.request_filter import RequestFilter
from vllm_overlay.multi_connector.settings import MultiSettings

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Reply:
    """One child's reply to one lookup. ``tokens`` is None while it is still looking."""

    tokens: int | None = 0
    asynchronous: bool = False
    junction: object = None
    ignored: Reason | None = None
    """Why the child's settings leave its tokens out of the decision."""
    ignored_tokens: int = 0


@dataclass(slots=True)
class Lookup:
    """The latest decision for a request, until it is finished."""

    replies: list[Reply]
    chosen: int | None
    asked_tokens: int
    counted: bool = False
    local_tokens: int = 0
    is_trial: bool = False


class Lookups:
    """The lookups of all unfinished requests. ``now``: seconds of one monotonic clock."""

    def __init__(
        self,
        children: Sequence[Child],
        control: ControlFile,
        filters: Sequence[RequestFilter],
        choice: Choice,
        settings: MultiSettings,
        has_recurrent_groups: bool,
    ) -> None:
        self._children, self._control, self._filters, self._choice = children, control, filters, choice
        self._timeout_s = settings.lookup_timeout_ms / 1000
        self._load_timeout_s = settings.isolate_after_s or math.inf
        self._has_recurrent_groups = has_recurrent_groups
        self.by_request: dict[str, Lookup] = {}
        self._waiting_since: dict[str, float] = {}
        self._failed_attempts: dict[str, dict[int, int]] = {}

    def find(self, request: "Request", num_computed_tokens: int, now: float) -> tuple[int | None, bool]:
        """The tokens to load and whether asynchronously; None to be asked again.

        Asks every child. Waits for a child that is still looking while it could win, at most until the deadline.
        """
        asked = request.num_tokens - num_computed_tokens
        ceiling = max(asked - 1 if self._has_recurrent_groups else asked, 0)
        junction = request.shared_prefix_boundary
        replies: list[Reply] = []
        for child in self._children:
            request.shared_prefix_boundary = junction
            replies.append(self._ask(child, request, num_computed_tokens, ceiling))
        request.shared_prefix_boundary = junction

        waited_s = self._waited_s(request.request_id, replies, now)
        offers = [
            0 if reply.tokens is None and waited_s >= self._patience_s(child, ceiling) else reply.tokens
            for child, reply in zip(self._children, replies, strict=True)
        ]
        verdict = self._choice.decide(offers, ceiling)
        if logger.isEnabledFor(logging.DEBUG):
            self._say(request.request_id, asked, replies, verdict)
        if verdict.wait:
            return None, False
        chosen = replies[verdict.chosen] if verdict.chosen is not None else Reply()
        tokens = chosen.tokens or 0
        request.shared_prefix_boundary = merge_junctions(
            junction, [reply.junction for reply in replies], num_computed_tokens + tokens, request.num_tokens
        )
        self.by_request[request.request_id] = Lookup(
            replies, verdict.chosen, asked, local_tokens=num_computed_tokens, is_trial=verdict.is_trial
        )
        return tokens, chosen.asynchronous

    def _say(self, request_id: str, asked: int, replies: Iterable[Reply], verdict: Verdict) -> None:
        """Why this child is chosen, or none is."""
        offers = []
        for child, reply in zip(self._children, replies, strict=True):
            if reply.ignored is not None:
                offer = f"{reply.ignored_tokens} (ignored: {reply.ignored})"
            elif reply.tokens:
                offer = f"{reply.tokens} (worth {self._choice.worth(child.index, reply.tokens):.0f})"
            elif reply.tokens is None:
                offer = "is looking"
            else:
                offer = "nothing" if child.in_service else "is out of service"
            offers.append(f"{child.name} {offer}")
        found = "none" if verdict.chosen is None else self._children[verdict.chosen].name
        logger.debug(
            "request %s: %d tokens are not on the device; %s; %s", request_id, asked, ", ".join(offers),
            "asks again" if verdict.wait else f"chosen: {found}{', to measure it' if verdict.is_trial else ''}",
        )  # fmt: skip

    def _ask(self, child: Child, request: "Request", num_computed_tokens: int, ceiling: int) -> Reply:
        nothing = Reply()
        if self._filters[child.index].is_unknown(request.request_id):
            return nothing
        found = child.call("get_num_new_matched_tokens", None, request, num_computed_tokens, parse=validation.lookup)
        if found is None:
            return nothing
        junction = request.shared_prefix_boundary
        tokens, asynchronous = found
        if tokens is None or validation.is_possible(tokens, ceiling):
            if (ignored := self._why_ignored(child, request.request_id, tokens)) is not None:
                return Reply(0, asynchronous, junction, ignored, ignored_tokens=tokens or 0)
            return Reply(tokens, asynchronous, junction)
        child.tally.count("invalid_answers")
        child.log_once("answer", "offered %r tokens where 0 to %d are possible. That counts as 0.", tokens, ceiling)
        return nothing

    def _why_ignored(self, child: Child, request_id: str, tokens: int | None) -> Reason | None:
        """Why ``child`` may not load so many tokens, or may not load at all; None when it may."""
        settings = self._control.settings[child.name]
        if not settings.load:
            return Reason.LOAD_OFF
        if not self._filters[child.index].works_on(request_id):
            return Reason.WITHHELD
        if self._failed_attempts.get(request_id, {}).get(child.index, 0) >= settings.max_load_attempts:
            return Reason.ATTEMPTS
        return Reason.MIN_TOKENS if tokens is not None and tokens < settings.min_tokens else None

    def _waited_s(self, request_id: str, replies: Iterable[Reply], now: float) -> float:
        """Seconds since the request's first None, until it is admitted."""
        if all(reply.tokens is not None for reply in replies):
            return 0.0
        return now - self._waiting_since.setdefault(request_id, now)

    def _patience_s(self, child: Child, ceiling: int) -> float:
        """How long a request waits while ``child`` is still looking.

        For a read that may be under way it is what the best answer would spare. So in all it takes no longer than twice
        what the best choice would have taken.
        """
        if not ceiling or getattr(child.connector, "reads_while_looking", False) is not True:  # see ``NamedChild``
            return self._timeout_s
        return max(self._timeout_s, min(self._choice.spared_s(child.index, ceiling), self._load_timeout_s))

    def chosen(self, request_id: str) -> Child | None:
        """The child that the latest lookup decided for."""
        lookup = self.by_request.get(request_id)
        return None if lookup is None or lookup.chosen is None else self._children[lookup.chosen]

    def count(self, request_id: str, num_external_tokens: int, now: float) -> None:
        """Once a decision, at admission, as vLLM counts: a lookup repeated for want of blocks is not counted."""
        waited_since = self._waiting_since.pop(request_id, None)
        lookup = self.by_request.get(request_id)
        if lookup is None or lookup.counted:
            return
        lookup.counted = True
        loader = lookup.chosen if num_external_tokens > 0 else None
        self._choice.decided([reply.tokens or 0 for reply in lookup.replies], lookup.asked_tokens, loader)
        for child, reply in zip(self._children, lookup.replies, strict=True):
            tally = child.tally
            offered = reply.tokens or 0
            tally.count("queries")
            tally.count("asked_tokens", lookup.asked_tokens)
            tally.count("offered_tokens", offered)
            if child.index == lookup.chosen:
                tally.count("chosen", num_external_tokens > 0)
                tally.count("trials", lookup.is_trial and num_external_tokens > 0)
            elif offered and lookup.chosen is not None:
                tally.count("outbid")
                tally.count("outbid_tokens", offered)
            elif offered and self._control.settings[child.name].load_weight:
                tally.count("too_slow")
                tally.count("too_slow_tokens", offered)
            if offered:
                tally.gauge("load_weight", max(self._choice.worth(child.index, offered) / offered, 0.0))
            if reply.ignored is not None and reply.ignored_tokens:
                tally.count("ignored_offers", label=reply.ignored)
                tally.count("ignored_offer_tokens", reply.ignored_tokens, reply.ignored)
            if waited_since is not None and reply.tokens is None:
                tally.count("lookup_wait_seconds", now - waited_since)

    def load_failed(self, request_id: str, child: int) -> None:
        """A load of ``child`` has failed. One of a request that is gone leaves nothing."""
        if request_id in self.by_request:
            attempts = self._failed_attempts.setdefault(request_id, {})
            attempts[child] = attempts.get(child, 0) + 1

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        for table in (self.by_request, self._waiting_since, self._failed_attempts):
            table.pop(request_id, None)


def merge_junctions(schedulers: int, childrens: Iterable[object], resume_tokens: int, num_tokens: int) -> int:
    """The one junction the scheduler stops at, of the values the children left in ``shared_prefix_boundary``.

    A junction is where a prefill should stop so that the state there is kept for siblings. It can only help ahead of
    ``resume_tokens`` (local hit plus the chosen child's tokens) and inside the request. The largest such value of the
    children's holds. Each child starts from the scheduler's value, so one that sets nothing votes for that. If there is
    none, the scheduler's own value holds. It is the largest, because the prefix up to it is what most tiers can serve
    to the next sibling. A stop that turns out useless costs one split of a prefill, never a wrong byte.
    """
    useful = [
        value
        for value in childrens
        if isinstance(value, int) and not isinstance(value, bool) and resume_tokens < value < num_tokens
    ]
    return max(useful, default=schedulers)
