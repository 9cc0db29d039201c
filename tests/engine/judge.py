# SPDX-License-Identifier: Apache-2.0
"""Turns of a workload, taken by an engine with both tiers, and whether its answers are right.

A request that is alone must be answered as by an engine without prefix caching, bit by bit, or as by vLLM without a
connector whose device cache hits as many tokens of it. Only the latter speculates where the engine does. Requests that
run together must keep to the bar of ``tests/engine/bar.py``.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.engine import oracle
from tests.engine.bar import BAR, BAR_OF_DRAFTS, UNCACHED, distance
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi
from tests.engine.states import States
from tests.engine.workload import Kind, Request, Turn
from vllm_overlay.common.reasons import Reason

_NUM_BLOCKS = 16
"""Of the device: bursts are preempted."""
UNIT = 64


class Judge:
    """``turns`` counts them by kind, ``answers`` counts verdicts."""

    def __init__(
        self, uncached: Engine, plain: Engine, known: Path | None = None, speculation: dict[str, Any] | None = None
    ) -> None:
        """``plain`` has a device cache and no connector. ``known`` is what a drafter reads."""
        self._uncached = uncached
        self._plain = plain
        self._known = known
        self._bar = BAR_OF_DRAFTS if speculation else BAR
        self._num_dropped = UNIT if speculation and speculation["method"] == "mtp" else 0
        self.turns: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()

    def take(self, engine: Engine, turn: Turn) -> list[str]:
        """The answers that nothing explains."""
        self.turns[turn.kind] += 1
        if turn.kind is Kind.RESET:
            engine.reset_device_cache()
        elif turn.kind is Kind.ABORT:
            engine.call("abort_after", **_arguments(turn.requests), num_steps=turn.num_steps)
        elif turn.kind is Kind.BURST:
            return self._burst(engine, turn.requests)
        else:
            return self._alone(engine, turn)
        return []

    def _burst(self, engine: Engine, requests: list[Request]) -> list[str]:
        wrong = []
        for request, answer in zip(requests, engine.generate_many(**_arguments(requests)), strict=True):
            far = distance(self._uncached, request.tokens, answer)
            what = f"burst of {len(request.tokens)}: {far:.3f} away"
            wrong += self._count("within the bar" if far <= self._bar else "", what)
        return wrong

    def _alone(self, engine: Engine, turn: Turn) -> list[str]:
        (request,) = turn.requests
        (wanted,) = self._uncached.generate_many(**_arguments([request]))
        request.answer = wanted.token_ids
        if self._known is not None:
            self._known.write_text(json.dumps([request.tokens + wanted.token_ids]))
        (answer,) = engine.generate_many(**_arguments(turn.requests))
        what = f"{turn.kind} of {len(request.tokens)}, {answer.num_cached_tokens} cached"
        if answer.same_as(wanted):
            return self._count("exact, restored or cached" if answer.num_cached_tokens else "exact, computed", what)
        vllms = self._without_connector(request, answer.num_cached_tokens)
        what += f", {request.constraint}: {_difference(answer, wanted)}; vLLM's: {_difference(answer, vllms)}"
        return self._count("as vLLM's device cache" if answer.same_as(vllms) else "", what)

    def _without_connector(self, request: Request, num_cached: int) -> Output:
        """What vLLM's device cache makes of the request when it holds so much of it, and nothing else."""
        self._plain.reset_device_cache()
        if num_cached:
            found = num_cached + self._num_dropped
            self._plain.generate(request.tokens[: found + 1], 1)  # its last token is never found
        (answer,) = self._plain.generate_many(**_arguments([request]))
        return answer

    def _count(self, verdict: str, what: str) -> list[str]:
        self.answers[verdict or "wrong"] += 1
        return [] if verdict else [what]


@contextmanager
def judge_of(
    model: Path,
    states: States,
    known: Path | None = None,
    speculation: dict[str, Any] | None = None,
    runner: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Judge]:
    """With two engines of its own. ``runner``: arguments of the one that has a device cache."""
    drafts = drafting(speculation, known, runner)
    with Engine(model, **_shape(states), **UNCACHED) as uncached, Engine(model, **_shape(states), **drafts) as plain:
        yield Judge(uncached, plain, known, speculation)


def drafting(speculation: dict[str, Any] | None, known: Path | None, runner: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that speculates, if it does; ``runner``: those of its model runner."""
    if not speculation:
        return dict(runner)
    environment = {**runner.get("environment", {}), oracle.KNOWN: str(known)}
    return {**runner, "speculative_config": speculation, "environment": environment}


def small_engine(model: Path, states: States, root: Path, cpu: str, disk: str, **arguments: Any) -> Engine:
    """One that evicts all the time; ``cpu`` and ``disk`` are the capacities of its tiers."""
    children = (cpu_child(capacity_bytes=cpu), disk_child(root, capacity_bytes=disk, min_free_bytes=0, load_weight=0.9))
    arguments = {**_shape(states), **arguments, "kv_transfer_config": multi(*children)}
    num_blocks = _num_blocks(arguments.get("speculative_config"))
    return Engine(model, num_gpu_blocks_override=num_blocks, **arguments)


def _num_blocks(speculation: dict[str, Any] | None) -> int:
    """With drafts: for two requests, and too few for both to pass a block's end. A module of MTP makes the groups of
    states two."""
    if not speculation:
        return _NUM_BLOCKS
    num_groups = 2 if speculation["method"] == "mtp" else 3
    return 2 * (num_groups * (1 + speculation["num_speculative_tokens"]) + 1) + 5


def counters_of(engine: Engine) -> Counter[str]:
    """Of the whole life of a small engine. A load whose objects were evicted after it was offered counts as none: the
    disk tier evicts beside the engine's thread, from a step's first lookup on."""
    own = {"preemptions": "num_preemptions", "accepted drafts": "spec_decode_num_accepted_tokens"}
    counters = Counter({name: int(engine.metric(f"vllm:{metric}")) for name, metric in own.items()})
    for tier in ("cpu", "disk"):
        for name in ("restored_tokens", "evicted_objects", "failed_loads"):
            counters[f"{tier}: {name}"] = int(engine.metric(f"vllm:hybrid_offload_{name}", connector=tier))
    too_late = engine.metric("vllm:hybrid_offload_failed_loads", connector="disk", reason=Reason.NOT_PLANNED)
    counters["disk: failed_loads"] -= int(too_late)
    return counters


def _shape(states: States) -> dict[str, Any]:
    return {**states.arguments, "max_model_len": 2 * states.block_size}


def _arguments(requests: list[Request]) -> dict[str, Any]:
    return {
        "prompts": [request.tokens for request in requests],
        "max_tokens": requests[0].max_tokens,
        "salts": [request.salt for request in requests],
        **({"structured_outputs": constraint} if (constraint := requests[0].constraint) else {}),
    }


def _difference(answer: Output, wanted: Output) -> str:
    if answer.token_ids != wanted.token_ids:
        return f"tokens {answer.token_ids} instead of {wanted.token_ids}"
    return f"logprobs up to {max(abs(a - b) for a, b in zip(answer.logprobs, wanted.logprobs, strict=True)):.3f} off"
