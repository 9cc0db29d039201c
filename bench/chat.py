# SPDX-License-Identifier: Apache-2.0
"""One side of ``bench/conversations.py``: a real engine that chats, or judges.

The side comes as JSON on its input. It prints one JSON line for each run. Answers are the engine's own, and become part
of the next turn's prompt.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.tiers.base import LoadTicket, StoreTicket
from vllm_overlay.tiers.cpu import CpuTierManager

SYSTEM_TOKENS = 500


class Side(msgspec.Struct, kw_only=True):
    """What one process does. ``prompts``, if any, are answered one by one; else ``seeds`` are chats of ``turns``."""

    model: str
    arguments: dict[str, Any]
    """Of ``vllm.LLM``."""
    seeds: list[int] = []
    turns: int = 10
    prompts: list[tuple[list[int], int]] = []
    """With the number of tokens to answer."""
    keeps_device_cache: bool = True


@dataclass(slots=True)
class Turn:
    """One request and its answer."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    num_cached_tokens: int
    stored: list[int] = field(default_factory=list)
    """Boundaries of the snapshots that it stored."""
    loaded: list[int] = field(default_factory=list)
    """Boundaries of the snapshots that it loaded."""


class Watch:
    """Notes which snapshots the CPU tier of this process is given and asked for."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.loaded: list[int] = []
        reserve_all, acquire = CpuTierManager.reserve_all, CpuTierManager.acquire

        def watched_reserve_all(tier: CpuTierManager, planned: Sequence[PlannedObject]) -> list[StoreTicket | None]:
            tickets = reserve_all(tier, planned)
            pairs = zip(planned, tickets, strict=True)
            self.stored += [item.end_tokens for item, ticket in pairs if ticket is not None and item.group_id is None]
            return tickets

        def watched_acquire(tier: CpuTierManager, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
            tickets = acquire(tier, planned)
            if tickets is not None:
                self.loaded += [one.end_tokens for one in planned if one.group_id is None]
            return tickets

        CpuTierManager.reserve_all = watched_reserve_all  # type: ignore[method-assign, assignment]
        CpuTierManager.acquire = watched_acquire  # type: ignore[method-assign, assignment]

    def take(self) -> tuple[list[int], list[int]]:
        """What was stored and loaded since the last call."""
        taken = self.stored, self.loaded
        self.stored, self.loaded = [], []
        return taken


class Chatter:
    """An engine in this process."""

    def __init__(self, side: Side) -> None:
        from vllm import LLM

        self._watch = Watch()
        self._side = side
        self._llm = LLM(side.model, **side.arguments)

    def turns(self) -> Iterator[Turn]:
        for prompt, num_tokens in self._side.prompts:
            yield self._answer(prompt, num_tokens)
        for seed in self._side.seeds:
            yield from self._chat(random.Random(seed))

    def _chat(self, source: random.Random) -> Iterator[Turn]:
        """Texts of 30 to 250 tokens, answers of 40 to 150."""
        prompt = _text(source, SYSTEM_TOKENS)
        for _ in range(self._side.turns):
            prompt = prompt + _text(source, source.randrange(30, 250))
            if len(prompt) % 64 == 1:  # vLLM itself is not exact there
                prompt.append(0)
            turn = self._answer(prompt, source.randrange(40, 150))
            yield turn
            prompt = prompt + turn.token_ids

    def _answer(self, prompt: list[int], num_tokens: int) -> Turn:
        from vllm import SamplingParams

        if not self._side.keeps_device_cache:
            self._settle()
            assert self._llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        self._settle()
        answer = output.outputs[0]
        logprobs = [chosen[token].logprob for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True)]
        return Turn(prompt, list(answer.token_ids), logprobs, output.num_cached_tokens or 0, *self._watch.take())

    def _settle(self) -> None:
        """Steps until no store is pending."""
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        while connector is not None and connector.has_pending_push_work():
            self._llm.llm_engine.step()


def _text(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(256) for _ in range(num_tokens)]


def main() -> None:
    side = msgspec.json.decode(sys.stdin.buffer.read(), type=Side)
    for turn in Chatter(side).turns():
        print(json.dumps(asdict(turn)), flush=True)


if __name__ == "__main__":
    main()
