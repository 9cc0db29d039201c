# SPDX-License-Identifier: Apache-2.0
"""What a drafter has proposed, and how many tokens were known then. Run inside the driver's process."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

_drafts: dict[str, list[tuple[int, list[int]]]] = {}
"""By request. The V2 runner proposes after each part of a prompt too, and says of no proposal what was known: 0."""


def watch() -> None:
    """For good, so in a process of its own."""
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

    take_in, set_draft_tokens = Scheduler.update_draft_token_ids, DraftTokensHandler.set_draft_tokens

    def update_draft_token_ids(scheduler: Any, found: Any) -> None:
        take_in(scheduler, found)
        for request_id, tokens in zip(found.req_ids, found.draft_token_ids, strict=True):
            request = scheduler.requests.get(request_id)
            is_told = -1 not in tokens  # not by the V2 runner
            if request is not None and not request.is_finished() and not request.is_prefill_chunk and is_told:
                _drafts.setdefault(request_id, []).append((request.num_tokens, list(tokens)))

    def set_tokens(handler: Any, batch: Any, tokens: Any) -> None:
        set_draft_tokens(handler, batch, tokens)
        for request_id, row in zip(batch.req_ids, tokens.tolist(), strict=True):
            _drafts.setdefault(request_id, []).append((0, row))

    Scheduler.update_draft_token_ids = update_draft_token_ids
    DraftTokensHandler.set_draft_tokens = set_tokens


def take() -> list[list[tuple[int, list[int]]]]:
    """Of each request since the last call, in the order of their first drafts."""
    taken = list(_drafts.values())
    _drafts.clear()
    return taken
