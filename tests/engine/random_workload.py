# SPDX-License-Identifier: Apache-2.0
"""Random requests through both tiers, small ones that evict all the time; each answer beside an uncached engine's.

Engines live one after the other on one disk root. A request that is alone must be answered as by the uncached engine,
bit by bit, or as by vLLM without a connector whose device cache hits as many tokens of it. Requests that run together
must keep to the bar of ``tests/engine/bar.py``.

The command: ``python -m tests.engine.random_workload --requests 1000 --lives 3 --seed 1``.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.bar import BAR, UNCACHED, distance
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi
from tests.engine.states import FLOAT32, STATES, States
from tests.engine.workload import Kind, Request, Turn, Workload
from tools.tiny_model import make_tiny_model

_NUM_BLOCKS = 16
"""Of the device: bursts are preempted."""
_PROGRESS = 50


@dataclass(slots=True)
class Seen:
    """What a run came to. ``wrong`` names requests whose answers nothing explains."""

    turns: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class RandomWorkload:
    """One run. Use ``run``."""

    def __init__(
        self, model: Path, seed: int, states: States = FLOAT32, connected: Mapping[str, Any] | None = None
    ) -> None:
        """``connected`` are more arguments of the engines with a connector."""
        self._model = model
        self._connected = connected or {}
        self._arguments = {**states.arguments, "max_model_len": 2 * states.block_size}
        self._workload = Workload(seed, states.block_size)
        self._uncached: Engine
        self._plain: Engine
        self.seen = Seen()

    def run(self, num_requests: int, num_lives: int) -> Seen:
        """Split over ``num_lives`` engines."""
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="workload-")))
            self._uncached = stack.enter_context(Engine(self._model, **self._arguments, **UNCACHED))
            self._plain = stack.enter_context(Engine(self._model, **self._arguments))
            for life in range(1, 1 + num_lives):
                self._live(scratch / "root", num_requests * life // num_lives)
        return self.seen

    def _live(self, root: Path, until: int) -> None:
        children = (
            cpu_child(capacity_bytes="16 MiB"),
            disk_child(root, capacity_bytes="64 MiB", min_free_bytes=0, load_weight=0.9),
        )
        arguments = {**self._arguments, **self._connected, "kv_transfer_config": multi(*children)}
        with Engine(self._model, num_gpu_blocks_override=_NUM_BLOCKS, **arguments) as engine:
            while self.seen.turns.total() < until:
                self._turn(engine, self._workload.next())
            engine.wait_for_stores()
            self._count(engine)

    def _turn(self, engine: Engine, turn: Turn) -> None:
        self.seen.turns[turn.kind] += 1
        if self.seen.turns.total() % _PROGRESS == 0:
            print(f"{self.seen.turns.total()} requests: {dict(self.seen.answers)}", file=sys.stderr, flush=True)
        if turn.kind is Kind.RESET:
            engine.reset_device_cache()
        elif turn.kind is Kind.ABORT:
            engine.call("abort_after", **_arguments(turn.requests), num_steps=turn.num_steps)
        elif turn.kind is Kind.BURST:
            self._burst(engine, turn.requests)
        else:
            self._alone(engine, turn)

    def _burst(self, engine: Engine, requests: list[Request]) -> None:
        for request, answer in zip(requests, engine.generate_many(**_arguments(requests)), strict=True):
            far = distance(self._uncached, request.tokens, answer)
            self._judge("within the bar" if far <= BAR else "", f"burst of {len(request.tokens)}: {far:.3f} away")

    def _alone(self, engine: Engine, turn: Turn) -> None:
        (request,) = turn.requests
        (answer,) = engine.generate_many(**_arguments(turn.requests))
        (wanted,) = self._uncached.generate_many(**_arguments([request]))
        request.answer = wanted.token_ids
        what = f"{turn.kind} of {len(request.tokens)}, {answer.num_cached_tokens} cached"
        if answer.same_as(wanted):
            self._judge("exact, restored or cached" if answer.num_cached_tokens else "exact, computed", what)
        else:
            is_vllms = answer.same_as(self._without_connector(request, answer.num_cached_tokens))
            self._judge("as vLLM's device cache" if is_vllms else "", f"{what}: {_difference(answer, wanted)}")

    def _without_connector(self, request: Request, num_cached: int) -> Output:
        """What vLLM's device cache makes of the request when it holds so much of it, and nothing else."""
        self._plain.reset_device_cache()
        if num_cached:
            self._plain.generate(request.tokens[: num_cached + 1], 1)  # its last token is never found
        return self._plain.generate(request.tokens, request.max_tokens)

    def _judge(self, verdict: str, what: str) -> None:
        self.seen.answers[verdict or "wrong"] += 1
        if not verdict:
            self.seen.wrong.append(f"request {self.seen.turns.total()}, {what}")

    def _count(self, engine: Engine) -> None:
        counters = self.seen.counters
        counters["preemptions"] += int(engine.metric("vllm:num_preemptions"))
        for tier in ("cpu", "disk"):
            for name in ("restored_tokens", "evicted_objects", "failed_loads"):
                counters[f"{tier}: {name}"] += int(engine.metric(f"vllm:hybrid_offload_{name}", connector=tier))


def _arguments(requests: list[Request]) -> dict[str, Any]:
    return {
        "prompts": [request.tokens for request in requests],
        "max_tokens": requests[0].max_tokens,
        "salts": [request.salt for request in requests],
    }


def _difference(answer: Output, wanted: Output) -> str:
    if answer.token_ids != wanted.token_ids:
        return f"tokens {answer.token_ids} instead of {wanted.token_ids}"
    return f"logprobs up to {max(abs(a - b) for a, b in zip(answer.logprobs, wanted.logprobs, strict=True)):.3f} off"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--lives", type=int, default=3, help="engines on one root, one after the other")
    parser.add_argument("--layers", type=int, default=4, help="of the model; every fourth has attention")
    parser.add_argument("--states", choices=[states.dtype for states in STATES], default=FLOAT32.dtype)
    parser.add_argument("--asynchronous", action="store_true", help="with asynchronous scheduling, forced on the CPU")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="model-") as scratch:
        model = make_tiny_model(Path(scratch) / "tiny", num_layers=arguments.layers)
        (states,) = (states for states in STATES if states.dtype == arguments.states)
        connected = {"async_scheduling": arguments.asynchronous}
        seen = RandomWorkload(model, arguments.seed, states, connected).run(arguments.requests, arguments.lives)
    print(json.dumps({"turns": seen.turns, "answers": seen.answers, "counters": seen.counters}, indent=2))
    print("\n".join(seen.wrong))
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
