# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive whether or not the scheduler keeps up: the time to their first token, on the scheduler lab.

``python -m bench.open_loop`` reads runs from stdin, one JSON object a line, and writes a result for each.
It runs on the vLLM that ``PYTHONPATH`` names. ``bench/prefill_steps.py`` starts it, for two of them.
"""

import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

MAX_REQUESTS = 1024
NUM_BLOCKS = 40_000
"""More than the requests need: what is measured is the split of the budget, not preemption."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is compared. Lengths are in tokens."""

    budget: int
    load: float
    """The share of the budget that arriving prompts and outputs would use."""
    block_size: int
    match_unit: int | None = None
    """None: the block."""


@dataclass(frozen=True, slots=True)
class Run:
    point: Point
    seed: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. ``time`` is in steps."""

    time: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Result:
    """Times to the first token from the arrival, and what all requests took."""

    first_tokens: list[float]
    num_steps: int
    num_tokens: int


def lengths(seed: int, num_requests: int) -> list[tuple[int, int]]:
    """Prompts from a question to a long document, answers of a sentence or two; a third are short, some very long."""
    draw = random.Random(seed)
    kinds = ((50, 1000), (1000, 8000), (1000, 12000))
    return [(draw.randint(*draw.choice(kinds)), draw.randint(5, 40)) for _ in range(num_requests)]


def arrivals(run: Run) -> list[Arrival]:
    """Poisson, at the rate that the load says. Rests on the seed alone, not on the vLLM."""
    shapes = lengths(run.seed, run.num_requests)
    mean = statistics.fmean(prompt + output for prompt, output in shapes)
    rate = run.point.load * run.point.budget / mean
    draw = random.Random(run.seed + 1)
    time = 0.0
    found = []
    for prompt, output in shapes:
        time += draw.expovariate(rate)
        found.append(Arrival(time, prompt, output))
    return found


def simulate(run: Run) -> Result:
    """All requests of a run, to the last token. A step begins when the one before ends, or when a request comes."""
    from devtools.scheduler_lab import LabSettings, make_request, make_scheduler, runner_output, sampled_tokens

    point = run.point
    settings = LabSettings(
        block_size=point.block_size,
        match_unit=point.match_unit,
        budget=point.budget,
        num_blocks=NUM_BLOCKS,
        max_requests=min(MAX_REQUESTS, point.budget),
    )
    scheduler = make_scheduler(settings)
    coming = arrivals(run)
    first: dict[str, float] = {}
    now, num_arrived, num_steps, num_tokens = 0.0, 0, 0, 0
    while num_arrived < len(coming) or scheduler.has_requests():
        if not scheduler.has_requests():
            now = max(now, coming[num_arrived].time)
        while num_arrived < len(coming) and coming[num_arrived].time <= now:
            arrival = coming[num_arrived]
            tokens = [num_arrived] * arrival.prompt  # no two prompts share a block
            scheduler.add_request(make_request(str(num_arrived), tokens, arrival.output, settings))
            num_arrived += 1
        output = scheduler.schedule()
        num_steps += 1
        num_tokens += output.total_num_scheduled_tokens
        now += 1.0
        sampled = sampled_tokens(scheduler, output)
        for name, said in sampled.items():
            if said and name not in first:
                first[name] = now - coming[int(name)].time
        scheduler.update_from_output(output, runner_output(sampled))
    return Result(list(first.values()), num_steps, num_tokens)


def read_runs() -> Iterator[Run]:
    for line in sys.stdin:
        run = json.loads(line)
        yield Run(**{**run, "point": Point(**run["point"])})


def main() -> None:
    import vllm

    print(json.dumps({"vllm": vllm.__file__}), flush=True)
    for run in read_runs():
        print(json.dumps(dataclasses.asdict(simulate(run))), flush=True)


if __name__ == "__main__":
    main()
