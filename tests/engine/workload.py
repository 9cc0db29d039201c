# SPDX-License-Identifier: Apache-2.0
"""Random requests that share, extend, diverge from, repeat and continue each other, and what happens between them."""

import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.engine.client import prompt

_KEPT = 40
"""So many prompts are remembered; later ones build on them."""
_SHORTEST, _LONGEST = 50, 480
_CONSTRAINTS: list[dict[str, Any] | None] = [
    *[None] * 7,
    {"regex": "[a-f]{40}"},
    {"json": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}},
]
"""No answer is as long as these are: behind the end of a structure logprobs are no numbers."""


class Kind(StrEnum):
    """What one turn of the workload does."""

    NEW = "new"
    EXTEND = "extend"
    """An earlier prompt and more text."""
    CONTINUE = "continue"
    """An earlier prompt, its answer and more text: the next turn of a chat."""
    DIVERGE = "diverge"
    """An earlier prompt up to anywhere, then other text."""
    REPEAT = "repeat"
    SALT = "salt"
    """An earlier prompt with a cache salt: as if nobody had sent it, but for those with the same salt."""
    ABORT = "abort"
    """Ends after some steps of the engine, wherever it is then."""
    BURST = "burst"
    """Several at once, so long that they take each other's blocks while they decode."""
    RESET = "reset"
    """The device prefix cache is emptied."""


_WEIGHTS = {
    Kind.NEW: 10,
    Kind.EXTEND: 20,
    Kind.CONTINUE: 12,
    Kind.DIVERGE: 20,
    Kind.REPEAT: 15,
    Kind.SALT: 8,
    Kind.ABORT: 6,
    Kind.BURST: 2,
    Kind.RESET: 10,
}


@dataclass(slots=True)
class Request:
    """One prompt. ``answer`` is what an uncached engine says to it, once that was asked. ``constraint`` is its
    structured output's, if it has one."""

    tokens: list[int]
    max_tokens: int
    salt: str = ""
    answer: list[int] = field(default_factory=list)
    constraint: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """``num_steps`` is for ``Kind.ABORT``."""

    kind: Kind
    requests: list[Request] = field(default_factory=list)
    num_steps: int = 0


class Workload:
    """Turns by a seed. ``block_size`` is N in tokens: requests of a burst come to about two blocks each.
    ``is_free``: without structured output.
    """

    def __init__(self, seed: int, block_size: int, is_free: bool = False) -> None:
        self._random = random.Random(seed)
        self._constraints = [None] if is_free else _CONSTRAINTS
        self._block_size = block_size
        self._earlier: list[Request] = []
        self._num_texts = 0

    def next(self) -> Turn:
        kind = self._random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if kind is Kind.RESET:
            return Turn(kind)
        if kind is Kind.BURST:
            return Turn(kind, [self._long() for _ in range(6)])
        request = self._request(kind)
        if kind is Kind.ABORT:
            return Turn(kind, [request], self._random.randrange(1, 8))
        request.constraint = self._random.choice(self._constraints)
        self._earlier = [*self._earlier, request][-_KEPT:]
        return Turn(kind, [request])

    def _text(self, shortest: int, longest: int) -> list[int]:
        self._num_texts += 1
        return prompt(self._random.randint(shortest, longest), 1_000_000 + self._num_texts)

    def _request(self, kind: Kind) -> Request:
        max_tokens = self._random.randint(1, 8)
        if not self._earlier or kind is Kind.NEW:
            return Request(self._text(_SHORTEST, _LONGEST), max_tokens)
        earlier = self._random.choice(self._earlier)
        tokens, salt = earlier.tokens, earlier.salt
        if kind in (Kind.EXTEND, Kind.ABORT):
            tokens = tokens + self._text(1, 200)
        elif kind is Kind.CONTINUE:
            tokens = tokens + earlier.answer + self._text(1, 100)
        elif kind is Kind.DIVERGE:
            tokens = tokens[: self._random.randint(1, len(tokens))] + self._text(1, 200)
        elif kind is Kind.SALT:
            salt = self._random.choice(["one", "two"])
        return Request(tokens[: 2 * _LONGEST], max_tokens, salt)

    def _long(self) -> Request:
        """A few tokens short of a whole block, so that decoding needs another one."""
        length = self._block_size - self._random.randint(1, 6)
        start = self._random.choice(self._earlier).tokens if self._earlier else []
        return Request((start + self._text(length, length))[:length], 10)
