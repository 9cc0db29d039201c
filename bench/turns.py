# SPDX-License-Identifier: Apache-2.0
"""What each turn of a chat computes again, over HTTP: ``python -m bench.turns``.

Each side is a server with the tiny hybrid model. It answers chats of ten turns, whose prompts are made of all that was
said before and a new text. Beside vLLM's own prefix cache, with more room than the chats need, stand CPU tiers that are
alone: the device cache is emptied before each turn.
"""

import argparse
import importlib
import json
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.measure import table
from bench.serving_sides import BLOCK_TOKENS, ONE_THREAD
from tools.server import Server
from vllm_overlay.server.api_client import ApiClient, ApiError
from vllm_overlay.server.process_group import ENDING_SIGNALS
from vllm_overlay.server.server_process import ServerError

SYSTEM_TOKENS = 500
TEXT_TOKENS = (30, 250)
VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """What makes a side.

    ``stores_decoded`` is the setting of its CPU tier, or None without a connector. With ``keeps_states`` vLLM keeps a
    state at the end of each block, in answers too, as ``--prefix-cache-retention-interval`` lets it.
    """

    name: str
    stores_decoded: bool | None
    keeps_states: bool = False

    def server(self, model: Path, log_path: Path) -> Server:
        flags = ["--mamba-ssm-cache-dtype", "bfloat16", "--block-size", str(BLOCK_TOKENS)]
        if self.keeps_states:
            flags += ["--prefix-cache-retention-interval", str(BLOCK_TOKENS)]
        environment = {**ONE_THREAD, "TORCHDYNAMO_DISABLE": "1"}
        return Server(model, self._transfer_config(), log_path=log_path, arguments=flags, environment=environment)

    def _transfer_config(self) -> dict[str, Any] | None:
        if self.stores_decoded is None:
            return None
        settings = {"tier": "cpu", "capacity_bytes": "1 GiB", "store_decoded_tokens": self.stores_decoded}
        return {
            "kv_connector": "HybridOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }


KINDS = (
    Kind("vLLM's device cache, no connector", None),
    Kind("CPU tier alone", False),
    Kind("CPU tier alone, decoded tokens stored", True),
    Kind("vLLM's device cache, states in answers", None, keeps_states=True),
    Kind("CPU tier alone, states in answers", False, keeps_states=True),
    Kind("CPU tier alone, states in answers, decoded tokens stored", True, keeps_states=True),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """``last_prompt``, ``last_answer``: tokens of the turn before, which this prompt begins with."""

    prompt: int
    cached: int
    last_prompt: int
    last_answer: int

    @property
    def recomputed(self) -> int:
        """Of what the turn before had computed."""
        return self.last_prompt + self.last_answer - min(self.cached, self.last_prompt + self.last_answer)

    @property
    def answer_restored(self) -> int:
        """Of the answer before."""
        return min(max(0, self.cached - self.last_prompt), self.last_answer)


def chat(api: ApiClient, empties_device_cache: bool, seed: int, num_turns: int, most_answer: int) -> list[Turn]:
    """One chat, whose lengths rest on the seed alone."""
    source = random.Random(seed)
    prompt = _text(source, SYSTEM_TOKENS)
    last_prompt = last_answer = 0
    turns = []
    for _ in range(num_turns):
        prompt = prompt + _text(source, source.randrange(*TEXT_TOKENS))
        if empties_device_cache:
            api.reset_prefix_cache()
        answer = api.complete(prompt, source.randrange(most_answer // 3, most_answer))
        if empties_device_cache:
            api.wait_for_stores()
        turns.append(Turn(len(prompt), answer.num_cached_tokens, last_prompt, last_answer))
        last_prompt, last_answer = len(prompt), len(answer.token_ids)
        prompt = prompt + answer.token_ids
    return turns


def _text(source: random.Random, num_tokens: int) -> list[int]:
    return source.choices(range(VOCABULARY), k=num_tokens)


def measure(kind: Kind, model: Path, directory: Path, arguments: argparse.Namespace) -> list[list[Turn]]:
    """The chats of one side, one after the other."""
    with kind.server(model, directory / "server.log") as api:
        is_alone = kind.stores_decoded is not None
        return [chat(api, is_alone, seed, arguments.turns, arguments.answer_tokens) for seed in range(arguments.chats)]


def columns(num_turns: int) -> list[str]:
    """The second turn is the first that has anything to restore."""
    return ["side", *(f"turn {turn}" for turn in range(2, num_turns + 1)), "all", "answers restored"]


def row(name: str, chats: Sequence[Sequence[Turn]]) -> list[object]:
    """Tokens recomputed of the turn before, the mean of all chats, and how much of their answers was restored."""
    by_turn = list(zip(*chats, strict=True))[1:]
    means = [round(sum(turn.recomputed for turn in turns) / len(turns)) for turns in by_turn]
    answers = sum(turn.last_answer for turns in by_turn for turn in turns)
    restored = sum(turn.answer_restored for turns in by_turn for turn in turns)
    return [name, *means, sum(means), f"{restored:,} of {answers:,}"]


def run(arguments: argparse.Namespace, console: Console) -> list[list[list[Turn]]]:
    """All sides."""
    models = importlib.import_module("tools.tiny_model")  # untyped
    with tempfile.TemporaryDirectory() as directory:
        model = models.make_tiny_model(Path(directory) / "tiny")
        sides = track(KINDS, "chats with each side", console=console)
        return [measure(kind, model, Path(directory), arguments) for kind in sides]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10, help="of a chat (default: 10)")
    parser.add_argument("--chats", type=int, default=2, help="how many (default: 2)")
    parser.add_argument(
        "--answer-tokens", type=int, default=300, help="answers have a third of so many to so many (default: 300)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each turn there")
    arguments = parser.parse_args(argv)
    if min(arguments.turns - 1, arguments.chats, arguments.answer_tokens - 2) < 1:
        parser.error("a chat has at least 2 turns and answers of up to 3 tokens, and there is at least 1 chat")
    console = Console(stderr=True)
    try:
        found = run(arguments, console)
    except (ServerError, ApiError, OSError) as error:
        console.print(f"failed: {error}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: nothing is left running")
        return 130
    print(table(columns(arguments.turns), (row(kind.name, one) for kind, one in zip(KINDS, found, strict=True))))
    if arguments.json is not None:
        named = {
            kind.name: [[asdict(turn) for turn in one] for one in side] for kind, side in zip(KINDS, found, strict=True)
        }
        arguments.json.write_text(json.dumps(named))
    return 0


if __name__ == "__main__":
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
