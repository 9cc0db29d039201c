# SPDX-License-Identifier: Apache-2.0
"""Which requests one child sees. A child stores what it sees scheduled, so what it must not store it does not see.

- An *unknown* request is older than the child's present instance. The instance was never told of it and never is.
- A request *without work* is announced to the child and looked up in it, but never gets blocks or steps there: to the
  child it is a request that waits and is then aborted. This is for a child with ``store`` off. With ``promote``
  off it is for requests that another child loads.

Either lasts until the request is finished: a child cannot take up a request in the middle.

vLLM's OffloadingConnector does not hold the blocks that its stores read. It ends a store when it hears that a block of
it has another owner. So a child is told of the blocks that others write, as if they were copied to.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from vllm_overlay.multi_connector.metadata import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput

Value = TypeVar("Value")

FILTERED = frozenset(
    {
        *("scheduled_new_reqs", "scheduled_cached_reqs", "scheduled_spec_decode_tokens", "scheduled_encoder_inputs"),
        *("num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids", "preempted_req_ids"),
        *("kv_connector_block_state", "kv_cache_block_copies"),
    }
)
"""Fields of a view that depend on who sees it and so are not those of the scheduler's output."""


class RequestFilter:
    """One child's. All ids are request ids."""

    def __init__(self) -> None:
        self._unknown: set[str] = set()
        self._without_work: set[str] = set()
        self._after_this_step: set[str] = set()
        self._finished_unknown: set[str] = set()

    def reset(self, living: Iterable[str]) -> None:
        """For a new instance: all requests that live now are unknown to it."""
        self._unknown = set(living)
        for table in (self._without_work, self._after_this_step, self._finished_unknown):
            table.clear()

    def add_unknown(self, request_id: str) -> None:
        """A request that came while no instance was in service."""
        self._unknown.add(request_id)

    def is_unknown(self, request_id: str) -> bool:
        """Whether the present instance was never told of the request."""
        return request_id in self._unknown

    def works_on(self, request_id: str) -> bool:
        """Whether the child gets the request's blocks and steps."""
        return request_id not in self._unknown and request_id not in self._without_work

    def give_no_work(self, request_id: str) -> None:
        self._without_work.add(request_id)

    def give_no_work_after_this_step(self, request_id: str) -> None:
        """It loads the request, so it has to see the step that tells it to, and no more."""
        self._after_this_step.add(request_id)

    def finished(self, request_id: str) -> None:
        """An unknown request stays unknown until the next step's plan, which names the finished requests."""
        self._without_work.discard(request_id)
        self._after_this_step.discard(request_id)
        if request_id in self._unknown:
            self._finished_unknown.add(request_id)

    def plan(
        self, output: "SchedulerOutput", build: "Callable[[SchedulerOutput], Value]", loaded: Collection[int] = ()
    ) -> Value:
        """What ``build`` makes of the step without what the child must not see.

        ``loaded``: the blocks that loads of other children write from this step on.

        What it has set in its view is set in ``output``: vLLM's connectors set ``new_block_ids_to_zero`` and
        ``has_sync_kv_loads``.
        """
        if not (self._unknown or self._without_work or self._after_this_step or loaded):
            return build(output)
        view = _without(output, self._unknown | self._without_work, self._unknown, loaded)
        built = build(view)
        for field in dataclasses.fields(output):
            if field.name not in FILTERED:
                setattr(output, field.name, getattr(view, field.name))
        self._without_work |= self._after_this_step
        self._after_this_step.clear()
        self._unknown -= self._finished_unknown
        self._finished_unknown.clear()
        return built


def _without(
    output: "SchedulerOutput", hidden: set[str], unknown: set[str], loaded: Collection[int]
) -> "SchedulerOutput":
    written = {*loaded, *(_new_blocks(output, hidden) if hidden else ())}
    copies = [*(output.kv_cache_block_copies or ()), *(KVCacheBlockCopy(NULL_BLOCK, block) for block in written)]
    view = dataclasses.replace(output, kv_cache_block_copies=copies or None)
    if not hidden:
        return view
    scheduled = {r: number for r, number in output.num_scheduled_tokens.items() if r not in hidden}
    return dataclasses.replace(
        view,
        scheduled_new_reqs=[request for request in output.scheduled_new_reqs if request.req_id not in hidden],
        scheduled_cached_reqs=_cached_without(output.scheduled_cached_reqs, hidden),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=_dict_without(output.scheduled_spec_decode_tokens, hidden),
        scheduled_encoder_inputs=_dict_without(output.scheduled_encoder_inputs, hidden),
        finished_req_ids=output.finished_req_ids - unknown,
        preempted_req_ids=None if output.preempted_req_ids is None else output.preempted_req_ids - hidden,
        kv_connector_block_state=_state_without(output.kv_connector_block_state, hidden),
    )


def _new_blocks(output: "SchedulerOutput", hidden: set[str]) -> set[int]:
    """The blocks that this step gives to requests that the child does not see."""
    cached = output.scheduled_cached_reqs
    given = [(request.req_id, request.block_ids) for request in output.scheduled_new_reqs]
    given += zip(cached.req_ids, cached.new_block_ids, strict=True)
    return {block for name, groups in given if name in hidden for ids in groups or () for block in ids} - {NULL_BLOCK}


def _dict_without(of: dict[str, Value], hidden: set[str]) -> dict[str, Value]:
    return {request_id: value for request_id, value in of.items() if request_id not in hidden}


def _cached_without(cached: "CachedRequestData", hidden: set[str]) -> "CachedRequestData":
    kept = [i for i, request_id in enumerate(cached.req_ids) if request_id not in hidden]
    return dataclasses.replace(
        cached,
        req_ids=[cached.req_ids[i] for i in kept],
        resumed_req_ids=cached.resumed_req_ids - hidden,
        # Empty without pipeline parallelism.
        new_token_ids=[cached.new_token_ids[i] for i in kept] if cached.new_token_ids else [],
        all_token_ids=_dict_without(cached.all_token_ids, hidden),
        new_block_ids=[cached.new_block_ids[i] for i in kept],
        num_computed_tokens=[cached.num_computed_tokens[i] for i in kept],
        num_output_tokens=[cached.num_output_tokens[i] for i in kept],
    )


def _state_without(state: "KVConnectorBlockState | None", hidden: set[str]) -> "KVConnectorBlockState | None":
    if state is None:
        return None
    return dataclasses.replace(
        state,
        req_ids=state.req_ids - hidden,
        boundary_state_offloads=_dict_without(state.boundary_state_offloads, hidden),
    )
