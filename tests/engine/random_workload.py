# SPDX-License-Identifier: Apache-2.0
"""Random requests through both tiers, small ones that evict all the time; each answer beside an uncached engine's.

Engines live one after the other on one disk root. ``tests/engine/judge.py`` says what an answer must be.

The command: ``python -m tests.engine.random_workload --requests 1000 --lives 3 --seed 1``.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.interpreted_triton import V2_RUNNER
from tests.engine.judge import Judge, counters_of, drafting, judge_of, small_engine
from tests.engine.states import FLOAT32, STATES, States
from tests.engine.workload import Workload
from tools.tiny_model import make_tiny_model

_PROGRESS = 50
DRAFTERS = {"mtp": {"method": "mtp"}, "oracle": {"method": "custom_class", "model": "tests.engine.oracle.Oracle"}}
"""Of ``--speculative-config``. The head of MTP is hardly ever right. The oracle is in none to all of its drafts."""


@dataclass(slots=True)
class Seen:
    """What a run came to. ``wrong`` names requests whose answers nothing explains."""

    turns: Counter[str]
    answers: Counter[str]
    counters: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class RandomWorkload:
    """One run. Use ``run``."""

    def __init__(
        self,
        model: Path,
        seed: int,
        states: States = FLOAT32,
        connected: Mapping[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        runner: Mapping[str, Any] | None = None,
    ) -> None:
        """``connected`` are more arguments of the engines with a connector, ``runner`` of those with a prefix cache.
        ``speculation`` is vLLM's."""
        self._model = model
        self._runner = runner or {}
        self._speculation = speculation
        self._states = states
        self._connected = connected or {}
        # Triton's interpreter cannot run the V2 runner's kernel for structured output.
        self._workload = Workload(seed, states.block_size, is_free=bool(runner))

    def run(self, num_requests: int, num_lives: int) -> Seen:
        """Split over ``num_lives`` engines."""
        with (
            tempfile.TemporaryDirectory(prefix="workload-") as scratch,
            judge_of(
                self._model, self._states, known := Path(scratch) / "known.json", self._speculation, self._runner
            ) as judge,
        ):
            self._connected = {**self._connected, **drafting(self._speculation, known, self._runner)}
            seen = Seen(judge.turns, judge.answers)
            for life in range(1, 1 + num_lives):
                self._live(Path(scratch) / "root", judge, num_requests * life // num_lives, seen)
        return seen

    def _live(self, root: Path, judge: Judge, until: int, seen: Seen) -> None:
        with small_engine(self._model, self._states, root, "16 MiB", "64 MiB", **self._connected) as engine:
            while judge.turns.total() < until:
                wrong = judge.take(engine, self._workload.next())
                seen.wrong += [f"request {judge.turns.total()}, {what}" for what in wrong]
                if judge.turns.total() % _PROGRESS == 0:
                    print(f"{judge.turns.total()} requests: {dict(judge.answers)}", file=sys.stderr, flush=True)
            engine.wait_for_stores()
            seen.counters.update(counters_of(engine))


def fewer_together(num_drafts: int) -> list[tuple[int, int, int]]:
    """``num_speculative_tokens_per_batch_size``: one draft less for each request more, down to none."""
    return [(1 + fewer, 1 + fewer, num_drafts - fewer) for fewer in range(num_drafts + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--lives", type=int, default=3, help="engines on one root, one after the other")
    parser.add_argument("--layers", type=int, default=4, help="of the model; every fourth has attention")
    parser.add_argument("--states", choices=[states.dtype for states in STATES], default=FLOAT32.dtype)
    parser.add_argument("--asynchronous", action="store_true", help="with asynchronous scheduling, forced on the CPU")
    parser.add_argument("--v2", action="store_true", help="with the V2 model runner, in Triton's interpreter: slow")
    parser.add_argument("--drafts", type=int, default=0, help="of each step: so many are proposed by --drafter")
    parser.add_argument(
        "--drafter", choices=DRAFTERS, default="mtp", help="hardly ever right; or one that knows answers"
    )
    parser.add_argument(
        "--fewer-together", action="store_true", help="one draft less for each request more that runs beside"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="model-") as scratch:
        speculation = {**DRAFTERS[arguments.drafter], "num_speculative_tokens": arguments.drafts}
        if arguments.fewer_together:
            speculation["num_speculative_tokens_per_batch_size"] = fewer_together(arguments.drafts)
        has_head = bool(arguments.drafts) and arguments.drafter == "mtp"
        model = make_tiny_model(Path(scratch) / "tiny", num_layers=arguments.layers, has_draft_head=has_head)
        (states,) = (states for states in STATES if states.dtype == arguments.states)
        connected = {"async_scheduling": arguments.asynchronous}
        workload = RandomWorkload(
            model,
            arguments.seed,
            states,
            connected,
            speculation if arguments.drafts else None,
            V2_RUNNER if arguments.v2 else None,
        )
        seen = workload.run(arguments.requests, arguments.lives)
    print(json.dumps({"turns": seen.turns, "answers": seen.answers, "counters": seen.counters}, indent=2))
    print("\n".join(seen.wrong))
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
