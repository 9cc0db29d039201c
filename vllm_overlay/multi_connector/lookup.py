# SPDX-License-Identifier: Apache-2.0
"""A request's lookup: every child is asked, the best offer is chosen, and the decision is kept until it is counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_overlay.multi_connector import validation
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.control_file import ControlFile
from vllm_overlay.multi_connector.request_filter import RequestFilter
from vllm_overlay.multi_connector.selection import Offer, merge_junctions, valid_tokens
from vllm_overlay.multi_connector.selection_rules.guarded import GuardedRule

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Reply:
    """One child's reply to one lookup."""

    offer: Offer
    asynchronous: bool = False
    junction: object = None


@dataclass(slots=True)
class Lookup:
    """The latest decision for a request, until it is finished."""

    replies: list[Reply]
    chosen: int | None
    asked_tokens: int
    counted: bool = False
    local_tokens: int = 0


class Lookups:
    """The lookups of all unfinished requests. ``now``: seconds of one monotonic clock."""

    def __init__(
        self,
        children: Sequence[Child],
        control: ControlFile,
        filters: Sequence[RequestFilter],
        rule: GuardedRule,
        timeout_s: float,
        has_recurrent_groups: bool,
    ) -> None:
        """``timeout_s``: how long a request waits for children that are still looking."""
        self._children, self._control, self._filters, self._rule = children, control, filters, rule
        self._timeout_s = timeout_s
        self._has_recurrent_groups = has_recurrent_groups
        self.by_request: dict[str, Lookup] = {}
        self._waiting_since: dict[str, float] = {}
        self._failed_attempts: dict[str, dict[int, int]] = {}

    def find(self, request: "Request", num_computed_tokens: int, now: float) -> tuple[int | None, bool]:
        """The tokens to load and whether asynchronously; None to be asked again.

        Asks every child. Waits for one that is still looking only while it could win, and up to the deadline.
        """
        asked = request.num_tokens - num_computed_tokens
        ceiling = max(asked - 1 if self._has_recurrent_groups else asked, 0)
        junction = request.shared_prefix_boundary
        replies: list[Reply] = []
        for child in self._children:
            request.shared_prefix_boundary = junction
            replies.append(self._ask(child, request, num_computed_tokens, ceiling))
        request.shared_prefix_boundary = junction

        offers = [reply.offer for reply in replies]
        verdict = self._rule.decide(offers, ceiling, may_wait=self._may_wait(request.request_id, offers, now))
        if verdict.wait:
            return None, False
        chosen = replies[verdict.chosen] if verdict.chosen is not None else Reply(Offer(0, 0.0))
        tokens = chosen.offer.tokens or 0
        request.shared_prefix_boundary = merge_junctions(
            junction, [reply.junction for reply in replies], num_computed_tokens + tokens, request.num_tokens
        )
        self.by_request[request.request_id] = Lookup(replies, verdict.chosen, asked, local_tokens=num_computed_tokens)
        return tokens, chosen.asynchronous

    def _ask(self, child: Child, request: "Request", num_computed_tokens: int, ceiling: int) -> Reply:
        settings = self._control.settings[child.name]
        nothing = Reply(Offer(0, settings.load_weight))
        if self._filters[child.index].is_unknown(request.request_id):
            return nothing
        found = child.call("get_num_new_matched_tokens", None, request, num_computed_tokens, parse=validation.lookup)
        if found is None:
            return nothing
        junction = request.shared_prefix_boundary
        answer, asynchronous = found
        tokens = None if answer is None else valid_tokens(answer, ceiling)
        if answer is not None and tokens is None:
            child.counters.invalid_answers += 1
            child.log_once(
                "answer", "offered %r tokens where 0 to %d are possible; taken as 0, and counted.", answer, ceiling
            )
            return nothing
        if not self._may_load(child, request.request_id) or (tokens is not None and tokens < settings.min_tokens):
            tokens = 0
        return Reply(Offer(tokens, settings.load_weight, self._rule.value_of(child.index)), asynchronous, junction)

    def _may_load(self, child: Child, request_id: str) -> bool:
        settings = self._control.settings[child.name]
        return (
            settings.load
            and self._filters[child.index].works_on(request_id)
            and self._failed_attempts.get(request_id, {}).get(child.index, 0) < settings.max_load_attempts
        )

    def _may_wait(self, request_id: str, offers: list[Offer], now: float) -> bool:
        """Whether the deadline is still ahead. It runs from the request's first None until it is admitted."""
        if all(offer.tokens is not None for offer in offers):
            return True
        return now - self._waiting_since.setdefault(request_id, now) < self._timeout_s

    def chosen(self, request_id: str) -> Child | None:
        """The child that the latest lookup decided for."""
        lookup = self.by_request.get(request_id)
        return None if lookup is None or lookup.chosen is None else self._children[lookup.chosen]

    def is_asynchronous(self, request_id: str, child: Child) -> bool:
        """Whether ``child``, which was chosen, loads asynchronously."""
        return self.by_request[request_id].replies[child.index].asynchronous

    def count(self, request_id: str, num_external_tokens: int, now: float) -> None:
        """Once a decision, at admission, as vLLM counts: a lookup repeated for want of blocks is not counted."""
        waited_since = self._waiting_since.pop(request_id, None)
        lookup = self.by_request.get(request_id)
        if lookup is None or lookup.counted:
            return
        lookup.counted = True
        for child, reply in zip(self._children, lookup.replies, strict=True):
            counters = child.counters
            offered = reply.offer.tokens or 0
            counters.queries += 1
            counters.asked_tokens += lookup.asked_tokens
            counters.offered_tokens += offered
            if child.index == lookup.chosen:
                counters.chosen += num_external_tokens > 0
            elif offered and lookup.chosen is not None:
                counters.outbid += 1
            elif offered and reply.offer.value is not None:
                counters.too_slow += 1
                self._rule.lost_to_computing(child.index)
            if waited_since is not None and reply.offer.tokens is None:
                counters.lookup_wait_seconds += now - waited_since

    def load_failed(self, request_id: str, child: int) -> None:
        """A load of ``child`` has failed. One of a request that is gone leaves nothing."""
        if request_id in self.by_request:
            attempts = self._failed_attempts.setdefault(request_id, {})
            attempts[child] = attempts.get(child, 0) + 1

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        for table in (self.by_request, self._waiting_since, self._failed_attempts):
            table.pop(request_id, None)

    @property
    def tracked(self) -> int:
        """Entries in its tables."""
        return len(self.by_request) + len(self._waiting_since) + len(self._failed_attempts)
