# SPDX-License-Identifier: Apache-2.0
"""Generated workloads: about 20 minutes of requests, the same for the same seed.

``chat``: conversations of many users, each with one of a few system prompts. ``agent``: runs that call tools, with
short pauses and long contexts over large shared prompts. ``retrieval``: questions about documents, some of them
popular. ``mixed``: all three. ``scan``: chat, and a job in the middle that passes over many long documents once.
``shifting``: chat whose system prompts, pace and lengths change every five minutes.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.trace import BLOCK_TOKENS, TraceRequest

DURATION_S = 1200.0


@dataclass(slots=True)
class Text:
    """Tokens of a growing prompt: whole blocks by id, and what is left over."""

    blocks: list[int] = field(default_factory=list)
    rest: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + self.rest


class Writer:
    """Makes up blocks, each with an id of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._num_blocks = 0

    def extend(self, text: Text, num_tokens: int) -> Text:
        """A copy with so many new tokens."""
        count, rest = divmod(text.rest + num_tokens, BLOCK_TOKENS)
        first = self._num_blocks
        self._num_blocks += count
        return Text(text.blocks + list(range(first, first + count)), rest)

    def length(self, median: float, spread: float = 0.8, most: int = 60_000) -> int:
        """Tokens, log-normal."""
        return min(most, max(16, int(self.random.lognormvariate(math.log(median), spread))))

    def pause(self, median_s: float, spread: float = 1.0) -> float:
        return self.random.lognormvariate(math.log(median_s), spread)

    def arrivals(self, per_s: float, start: float = 0.0, end: float = DURATION_S) -> Iterator[float]:
        """A Poisson process."""
        now = start
        while (now := now + self.random.expovariate(per_s)) < end:
            yield now


Requests = Iterator[TraceRequest]


def request(text: Text, now: float, num_output: int) -> TraceRequest:
    return TraceRequest(now, max(1, text.num_tokens), num_output, tuple(text.blocks))


def conversation(
    writer: Writer,
    text: Text,
    now: float,
    *,
    goes_on: float,
    pause_s: float,
    question: float,
    answer: float,
) -> Requests:
    """Turns until its user has enough: each has the answer and a new question on top of the one before."""
    while True:
        text = writer.extend(text, writer.length(question))
        num_output = writer.length(answer, most=4_000)
        yield request(text, now, num_output)
        if writer.random.random() >= goes_on or text.num_tokens > 120_000:
            return
        now += num_output / 50 + writer.pause(pause_s)
        text = writer.extend(text, num_output)


def by_popularity(writer: Writer, texts: list[Text], skew: float = 1.0) -> Text:
    """One of them, the first ones oftener."""
    weights = [1 / (place + 1) ** skew for place in range(len(texts))]
    return writer.random.choices(texts, weights)[0]


def chat(
    writer: Writer, per_s: float = 1.2, start: float = 0.0, end: float = DURATION_S, scale: float = 1.0
) -> Requests:
    prompts = [writer.extend(Text(), writer.length(1500 * scale)) for _ in range(8)]
    for now in writer.arrivals(per_s, start, end):
        base = by_popularity(writer, prompts)
        # Most users ask once or twice; some stay.
        goes_on = writer.random.choice((0.2, 0.5, 0.85))
        first = writer.extend(base, writer.length(700 * scale, 1.2))
        yield from conversation(writer, first, now, goes_on=goes_on, pause_s=40.0, question=200 * scale, answer=350)


def agent(writer: Writer, per_s: float = 0.25) -> Requests:
    tools = [writer.extend(Text(), writer.length(9000, 0.3)) for _ in range(4)]
    for now in writer.arrivals(per_s):
        base = by_popularity(writer, tools)
        task = writer.extend(base, writer.length(3000, 1.0))
        yield from conversation(writer, task, now, goes_on=0.88, pause_s=4.0, question=1200, answer=200)


def retrieval(writer: Writer, per_s: float = 2.0) -> Requests:
    head = writer.extend(Text(), 1100)
    documents = [writer.extend(head, writer.length(6000, 0.7)) for _ in range(600)]
    for now in writer.arrivals(per_s):
        text = by_popularity(writer, documents, 0.8)
        yield from conversation(writer, text, now, goes_on=0.25, pause_s=25.0, question=120, answer=300)


def mixed(writer: Writer) -> Requests:
    yield from chat(writer, 0.7)
    yield from agent(writer, 0.12)
    yield from retrieval(writer, 0.8)


def scan(writer: Writer) -> Requests:
    yield from chat(writer)
    for now in writer.arrivals(4.0, 400.0, 700.0):
        yield request(writer.extend(Text(), writer.length(12_000, 0.4)), now, 100)


def shifting(writer: Writer) -> Requests:
    phases = 4
    for phase in range(phases):
        start, end = DURATION_S * phase / phases, DURATION_S * (phase + 1) / phases
        yield from chat(writer, (0.8, 2.0, 0.5, 1.4)[phase], start, end, (1.0, 0.4, 4.0, 2.0)[phase])


WORKLOADS: dict[str, Callable[[Writer], Requests]] = {
    "chat": chat,
    "agent": agent,
    "retrieval": retrieval,
    "mixed": mixed,
    "scan": scan,
    "shifting": shifting,
}


def generate(name: str, seed: int) -> list[TraceRequest]:
    """The requests of a workload in the order of their arrival. Raises KeyError."""
    requests = list(WORKLOADS[name](Writer(seed)))
    ordered = heapq.nsmallest(len(requests), enumerate(requests), key=lambda one: (one[1].arrival_s, one[0]))
    return [one for _, one in ordered if one.arrival_s < DURATION_S]
