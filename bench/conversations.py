# SPDX-License-Identifier: Apache-2.0
"""How exact multi-turn conversations are, and what their snapshots are for: ``python -m bench.conversations``.

Each side chats with a real engine on the tiny hybrid model and the engine's own answers. An engine without prefix
caching then answers the same prompts, and each turn is compared with it: tokens, and logprobs of the chosen tokens.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.chat import Side, Turn
from bench.measure import table
from bench.own_process import ENGINE, REPOSITORY

BLOCK_SIZES = {"float32": 1152, "bfloat16": 640}
NONE = "none"
UNCACHED = {"enable_prefix_caching": False, "prefix_match_unit": None}


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a side: what it is called, its tier's settings (None: no connector), what happens to the device cache."""

    name: str
    tier: dict[str, Any] | None
    keeps_device_cache: bool


PREFILLED, DECODED = {"store_decoded_tokens": False}, {"store_decoded_tokens": True}
KINDS = (
    Kind("vLLM's device cache, no connector", None, True),
    Kind("CPU tier alone", PREFILLED, False),
    Kind("CPU tier alone, decoded tokens stored", DECODED, False),
    Kind("CPU tier beside the device cache", PREFILLED, True),
    Kind("CPU tier beside it, decoded tokens stored", DECODED, True),
)
"""Where the tier is alone the device cache is emptied before each turn."""


def engine_arguments(states: str, **more: Any) -> dict[str, Any]:
    """Of ``vllm.LLM``: match unit 64, and the block size that vLLM finds for states of that dtype."""
    of_states = {} if states == NONE else {"mamba_ssm_cache_dtype": states, "block_size": BLOCK_SIZES[states]}
    return {
        "max_model_len": 8192,
        "max_num_batched_tokens": 2304,
        "prefix_match_unit": 64,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        **of_states,
        **more,
    }


def with_tier(settings: dict[str, Any] | None) -> dict[str, Any]:
    """``kv_transfer_config`` of a CPU tier."""
    if settings is None:
        return {}
    own = {"tier": "cpu", "capacity_bytes": "1 GiB", "hybrid_chunk_size": 64, **settings}
    connector = {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": own}
    return {"kv_transfer_config": connector}


def run(side: Side) -> list[Turn]:
    """All turns of one side, in a process of its own. Raises RuntimeError with the end of its log."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.chat"],
        input=msgspec.json.encode(side),
        capture_output=True,
        cwd=REPOSITORY,
        env={**os.environ, **ENGINE},
    )
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace")[-3000:])
    return [msgspec.json.decode(line, type=Turn) for line in done.stdout.splitlines() if line.startswith(b"{")]


@dataclass(frozen=True, slots=True)
class Judged:
    """One turn beside the uncached engine's answer to the same prompt."""

    turn: Turn
    has_same_tokens: bool
    distance: float
    """Of logprobs, up to the first token that differs."""

    @property
    def is_exact(self) -> bool:
        return self.has_same_tokens and self.distance == 0.0


def judge(turn: Turn, uncached: Turn) -> Judged:
    same = 0
    while same < len(turn.token_ids) and turn.token_ids[same] == uncached.token_ids[same]:
        same += 1
    pairs = zip(turn.logprobs[: same + 1], uncached.logprobs[: same + 1], strict=True)
    return Judged(turn, same == len(turn.token_ids), max(abs(own - theirs) for own, theirs in pairs))


def judge_all(model: Path, states: str, sides: Sequence[Sequence[Turn]]) -> list[list[Judged]]:
    """Against one engine without prefix caching, which answers each prompt once."""
    prompts = list({(tuple(turn.prompt), len(turn.token_ids)): None for turns in sides for turn in turns})
    arguments = engine_arguments(states, **UNCACHED)
    answers = run(Side(model=str(model), arguments=arguments, prompts=[(list(one), count) for one, count in prompts]))
    uncached = dict(zip(prompts, answers, strict=True))
    return [[judge(turn, uncached[tuple(turn.prompt), len(turn.token_ids)]) for turn in turns] for turns in sides]


def summary(name: str, judged: Sequence[Judged], num_turns: int) -> Sequence[object]:
    """One row of the table. A snapshot is known by its chat and boundary."""
    turns = [one.turn for one in judged]
    stored = sum(len(turn.stored) for turn in turns)
    loaded = {(number // num_turns, boundary) for number, turn in enumerate(turns) for boundary in turn.loaded}
    return (
        name,
        f"{sum(one.is_exact for one in judged)} of {len(judged)}",
        f"{sum(one.has_same_tokens for one in judged)} of {len(judged)}",
        f"{max(one.distance for one in judged):.3f}",
        sum(turn.num_cached_tokens for turn in turns),
        stored,
        len(loaded),
    )


COLUMNS = ("side", "exact turns", "same tokens", "logprobs off by", "tokens hit", "snapshots stored", "ever loaded")


def turn_row(name: str, one: Judged) -> Sequence[object]:
    turn = one.turn
    sizes = len(turn.prompt), len(turn.token_ids), turn.num_cached_tokens
    return (name, *sizes, turn.stored, turn.loaded, one.has_same_tokens, f"{one.distance:.4f}")


TURN_COLUMNS = ("side", "prompt", "answer", "tokens hit", "stored", "loaded", "same tokens", "logprobs off by")


def measure(kinds: Sequence[Kind], states: str, num_chats: int, num_turns: int) -> list[list[Judged]]:
    """The turns of each kind, one engine after the other."""
    models = importlib.import_module("tools.tiny_model")  # untyped
    make = models.make_sliding_window_model if states == NONE else models.make_tiny_model
    with tempfile.TemporaryDirectory() as directory:
        model = make(Path(directory) / "tiny")
        sides = [
            Side(
                model=str(model),
                arguments=engine_arguments(states, **with_tier(kind.tier)),
                seeds=list(range(num_chats)),
                turns=num_turns,
                keeps_device_cache=kind.keeps_device_cache,
            )
            for kind in kinds
        ]
        return judge_all(model, states, [run(side) for side in sides])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.conversations", description=__doc__)
    parser.add_argument("--turns", type=int, default=10, help="of a chat (default: 10)")
    parser.add_argument("--chats", type=int, default=2, help="how many (default: 2)")
    parser.add_argument(
        "--states",
        choices=[*BLOCK_SIZES, NONE],
        default="float32",
        help="their dtype (default: float32); none: a model with sliding windows",
    )
    parser.add_argument(
        "--side", type=int, action="append", help=f"0 to {len(KINDS) - 1}; default: all; may be repeated"
    )
    parser.add_argument("--each-turn", action="store_true", help="a row for each turn too")
    arguments = parser.parse_args(argv)
    kinds = [KINDS[place] for place in arguments.side or range(len(KINDS))]
    judged = measure(kinds, arguments.states, arguments.chats, arguments.turns)
    if arguments.each_turn:
        rows = [turn_row(kind.name, one) for kind, turns in zip(kinds, judged, strict=True) for one in turns]
        print(table(TURN_COLUMNS, rows) + "\n")
    print(table(COLUMNS, (summary(kind.name, one, arguments.turns) for kind, one in zip(kinds, judged, strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
