# SPDX-License-Identifier: Apache-2.0
"""A trace scaled down for a tiny model: some of its sessions, shorter prompts made of real tokens, less time."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.trace import BLOCK_TOKENS, TraceRequest

VOCABULARY = 256
"""Of the made-up tokens. Two blocks of other ids differ in their first few tokens."""
MOST_COMMON = 0.01
"""A block that more requests have, such as a system prompt, tells no session from another."""
LARGEST_SESSION = 50
"""In a short trace as many requests may have a block that still names a session."""


@dataclass(frozen=True, slots=True)
class ScaledRequest:
    """One request as it is sent. ``arrival_s``: from the start of its part of the run."""

    arrival_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def sessions(requests: Sequence[TraceRequest]) -> list[list[TraceRequest]]:
    """Requests that go on from each other. A request without a block of its session's is alone."""
    counts = Counter(block_id for request in requests for block_id in request.block_ids)
    limit = max(LARGEST_SESSION, MOST_COMMON * len(requests))
    found: dict[object, list[TraceRequest]] = {}
    for place, request in enumerate(requests):
        own = next((block_id for block_id in request.block_ids if counts[block_id] <= limit), None)
        found.setdefault(("alone", place) if own is None else own, []).append(request)
    return list(found.values())


def sample(requests: Sequence[TraceRequest], num_requests: int, seed: int) -> list[TraceRequest]:
    """Whole sessions of a trace, drawn by ``seed``, in the order of arrival. All of it if it has no more requests.

    A session stays whole, because a cache lives from what its requests share. The last one drawn loses its last turns.
    """
    drawn = sessions(requests)
    random.Random(seed).shuffle(drawn)
    chosen: list[TraceRequest] = []
    for session in drawn:
        chosen += session[: num_requests - len(chosen)]
    return sorted(chosen, key=lambda request: request.arrival_s)


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace becomes smaller. ``block_tokens``: what is left of each of its blocks of 512 tokens.

    ``most_tokens``: of a prompt and its answer together. Longer prompts lose their end.
    """

    block_tokens: int
    most_tokens: int

    def length(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self.block_tokens / BLOCK_TOKENS))

    def output_length(self, request: TraceRequest) -> int:
        return min(self.length(request.num_output_tokens), self.most_tokens // 2)

    def prompt_length(self, request: TraceRequest) -> int:
        return min(self.length(request.num_tokens), self.most_tokens - self.output_length(request))

    def num_tokens(self, request: TraceRequest) -> int:
        """Of prompt and answer."""
        return self.prompt_length(request) + self.output_length(request)

    def requests(self, trace: Sequence[TraceRequest], seconds: float, seed: int) -> list[ScaledRequest]:
        """What to send within ``seconds``. Equal blocks become equal tokens. The rest of a prompt is its own."""
        first, last = (trace[place].arrival_s for place in (0, -1))
        pace = seconds / (last - first) if last > first else 0.0
        return [
            ScaledRequest(
                (request.arrival_s - first) * pace,
                self._prompt(request, f"{seed} {place}"),
                self.output_length(request),
            )
            for place, request in enumerate(trace)
        ]

    def _prompt(self, request: TraceRequest, name: str) -> tuple[int, ...]:
        length = self.prompt_length(request)
        tokens: list[int] = []
        for block_id in request.block_ids[: -(-length // self.block_tokens)]:
            tokens += _tokens(f"block {block_id}", self.block_tokens)
        return tuple((tokens + _tokens(f"end {name}", max(0, length - len(tokens))))[:length])


def _tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(range(VOCABULARY), k=count)


def parts(requests: Sequence[ScaledRequest], count: int) -> list[list[ScaledRequest]]:
    """Consecutive parts of about as many requests, each with arrivals from its own start."""
    size = -(-len(requests) // count)
    found = []
    for place in range(0, len(requests), size):
        part = requests[place : place + size]
        found.append([replace(request, arrival_s=request.arrival_s - part[0].arrival_s) for request in part])
    return found


@dataclass(frozen=True, slots=True)
class Reuse:
    """What is in a run for a cache. ``shared``: the tokens that one of unlimited size could restore, which can go on
    from any match unit. ``distinct``: those it would hold. ``snapshots``: one for each distinct prompt."""

    prompts: int
    shared: int
    distinct: int
    snapshots: int


def reuse(requests: Iterable[ScaledRequest], match_unit: int) -> Reuse:
    """Over all requests in their order, as if each was answered before the next one came."""
    seen: set[int] = set()
    total = shared = snapshots = 0
    for request in requests:
        units = unit_names(request.prompt, match_unit)
        most = (len(request.prompt) - 1) // match_unit
        known = next((place for place, name in enumerate(units) if name not in seen), len(units))
        total += len(request.prompt)
        shared += min(known, most) * match_unit
        snapshots += known < most
        seen.update(units)
    return Reuse(total, shared, len(seen) * match_unit, snapshots)


def unit_names(prompt: Sequence[int], match_unit: int) -> list[int]:
    """A name for each whole match unit that says all that comes before it, too."""
    names, name = [], 0
    for end in range(match_unit, len(prompt) + 1, match_unit):
        name = hash((name, tuple(prompt[end - match_unit : end])))
        names.append(name)
    return names
