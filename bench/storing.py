# SPDX-License-Identifier: Apache-2.0
"""What storing costs an engine when nothing is hit: ``python -m bench.storing``.

Each side is an engine of ``bench.step_cost``, in a process of its own. Tiers of ours are full and evict. It gets
prompts that nobody has seen, eight together. Hooks are timed by the thread: copies from the KV cache are in them,
writes to a disk are not. What is on its way to a disk when the answers are there is written before the next turn.

An engine may be faster by some percent than another of the same kind, as long as it lives. So the time by the clock is
over that of the same engine while its connector is taken from it. The first side has none: it says what chance does.
All are started again and again, and the interval is that of the starts' medians.
"""

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.measure import interval, table
from bench.step_cost import NEW_PROMPT_TOKENS, SIDES, Step, make_engine, processes, serve, take_turns, watch_engine

ROUNDS_TO_FILL = range(4, 100)
PROMPTS_AT_ONCE, OUTPUT_TOKENS = 8, 4
ROLES = ("scheduler", "worker")
BOOKKEEPING_S = 0.2
"""After the last store: the disk tier removes what it evicts, and writes down what was used."""
LEAST_STARTS = 6
"""The fewest medians whose least and greatest have the true one between them in 95 of 100 cases."""
COLUMNS = ("side", "scheduler, ms a prompt", "worker, ms", "of the thread's other time", "over no connector")
Medians = Mapping[str, float]


class Storing:
    """An engine in this process whose tiers are full. It is sent prompts that nobody has seen."""

    def __init__(self, engine: Any, num_tiers: int) -> None:
        """``num_tiers``: those of ours. Raises RuntimeError if not all evict after 99 rounds of prompts."""
        from vllm import SamplingParams

        self._engine, self._source = engine, random.Random(0)
        self._core = engine.llm_engine.engine_core.engine_core
        self._parameters = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        evicted: list[Any] = []
        for number in range(1, ROUNDS_TO_FILL.stop):
            self._send()
            evicted = [one for one in engine.get_metrics() if one.name == "vllm:hybrid_offload_evicted_objects"]
            if number >= ROUNDS_TO_FILL.start and sum(one.value > 0 for one in evicted) == num_tiers:
                break
        else:
            raise RuntimeError(f"not all {num_tiers} tiers evict after {number} rounds of prompts: {evicted}")
        self._finish()
        self._stopwatch = watch_engine(self._core, time.thread_time)

    def _send(self) -> None:
        source = self._source
        prompts = [[source.randrange(256) for _ in range(NEW_PROMPT_TOKENS)] for _ in range(PROMPTS_AT_ONCE)]
        self._engine.generate([{"prompt_token_ids": one} for one in prompts], self._parameters, use_tqdm=False)

    def _finish(self) -> None:
        """Nothing is on its way any more, and the connector has heard of the end of all requests."""
        while self._core.scheduler.has_requests() or self._core.scheduler.requests:
            _, has_computed = self._core.step_fn()
            self._core.post_step(has_computed)
        time.sleep(BOOKKEEPING_S)

    def _timed(self) -> tuple[float, float]:
        """Of eight prompts: seconds by the clock, and of this thread."""
        begin, thread_s = time.perf_counter(), time.thread_time()
        self._send()
        found = time.perf_counter() - begin, time.thread_time() - thread_s
        self._finish()
        return found

    def ask(self, connector_first: bool) -> dict[str, float]:
        """Of eight prompts: milliseconds a prompt in hooks, their share of the thread's other time, and the time over
        that of eight prompts while there is no connector, which come before them or after them."""
        self._stopwatch.steps[:] = [Step()]
        seconds: dict[bool, tuple[float, float]] = {}
        for has_connector in (connector_first, not connector_first):
            with contextlib.nullcontext() if has_connector else without_connector(self._core.scheduler):
                seconds[has_connector] = self._timed()
        (own_s, thread_s), (without_s, _) = seconds[True], seconds[False]
        steps = self._stopwatch.steps
        scheduler, worker = (sum(sum(getattr(step, role).values()) for step in steps) for role in ROLES)
        return {
            "scheduler": 1e3 * scheduler / PROMPTS_AT_ONCE,
            "worker": 1e3 * worker / PROMPTS_AT_ONCE,
            "share": (scheduler + worker) / (thread_s - scheduler - worker),
            "over": own_s / without_s,
        }


@contextlib.contextmanager
def without_connector(scheduler: Any) -> Iterator[None]:
    """The engine of this process, whose worker lives in it too, as one that was started without a connector. Nothing
    of it may be under way at either end."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    halves = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = halves


def of_a_start(program: Sequence[str], num_rounds: int, orders: random.Random) -> list[Medians]:
    """What each of SIDES takes to store: the medians of its rounds, in each of which it is asked twice."""
    with processes(SIDES, program) as sides:
        found = take_turns(sides, [(True,), (False,)], num_rounds, orders)
    all_rounds = [[*first, *last] for first, last in zip(*found, strict=True)]
    return [{name: statistics.median(one[name] for one in rounds) for name in rounds[0]} for rounds in all_rounds]


def rows(starts: Sequence[Sequence[Medians]]) -> Iterator[Sequence[object]]:
    """One for each of SIDES, the first without a connector: the median of all starts."""
    for side, found in zip(SIDES, zip(*starts, strict=True), strict=True):
        own = {name: statistics.median(one[name] for one in found) for name in found[0]}
        times = interval([one["over"] for one in found])
        yield side.name, f"{own['scheduler']:.2f}", f"{own['worker']:.2f}", f"{own['share']:.2%}", times


def number_of_starts(text: str) -> int:
    if (number := int(text)) < LEAST_STARTS:
        raise argparse.ArgumentTypeError(f"{number} starts have no interval of 95 %: at least {LEAST_STARTS}")
    return number


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one row for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the model; every fourth has attention (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="of each start (default: 3)")
    parser.add_argument("--starts", type=number_of_starts, default=LEAST_STARTS, help="of all engines (default: 6)")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    if arguments.side is not None:
        side = SIDES[arguments.side]
        num_tiers = side.cpu + side.disk if side.is_ours else 0
        serve(
            lambda directory: make_engine(side, arguments.layers, directory),
            lambda engine: Storing(engine, num_tiers).ask,
        )
        return
    starts, orders = [], random.Random(0)
    for number in range(arguments.starts):
        print(f"start {number + 1} of {arguments.starts}", file=sys.stderr)
        starts.append(of_a_start(["bench.storing", *given], arguments.rounds, orders))
    print(table(COLUMNS, rows(starts)))


if __name__ == "__main__":
    main()
