# SPDX-License-Identifier: Apache-2.0
"""A trace served over HTTP with tiers and without, side by side: ``python -m bench.serving TRACE``.

Each side is a server of its own with the tiny hybrid model. All of them are up at once, and take turns: a part of the
trace goes to one, then to the next, until all are through. So whatever else the machine does hits all sides.
"""

import argparse
import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.http_load import interrupt_at_ending_signals, play, status_of
from bench.measure import table
from bench.scaled_trace import Scale, ScaledRequest, parts, reuse, sample
from bench.serving_outcome import COLUMNS, Outcome, Plan, as_json, described, rows
from bench.serving_sides import (
    CONTEXT_TOKENS,
    LOADING,
    MATCH_UNIT,
    NONE,
    OFFLOADING,
    OFFLOADING_FS,
    Running,
    Side,
    Sizes,
    lmcache,
    ours,
    server,
)
from bench.trace import TraceRequest, read_trace
from tools.server_process import ServerError
from vllm_overlay.metrics import CONNECTOR
from vllm_overlay.server.api_client import ApiClient
from vllm_overlay.server.interval import Interval

CALIBRATION_REQUESTS = 24
FEWEST_REQUESTS = 8
THIRD_PARTIES = {"offloading": OFFLOADING, "offloading-fs": OFFLOADING_FS}
EPILOG = """\
what is served
  Whole sessions of the trace, drawn by --seed. A block of 512 tokens of the trace becomes --block-tokens tokens, equal
  ones where the trace says so. Times between arrivals shrink alike, so that the load is --load. The first side, which
  has no connector, is what the others are compared with. It is asked first how many tokens a second it computes.

what the columns say
  restored        tokens of prompts from tiers, and "device hits" those from vLLM's own cache
  of sharable     both, over what a cache without a limit could restore that can go on anywhere; concurrent requests
                  that share something may each compute it, so 100% is out of reach
  first token     seconds since the request was due, so the wait for a busy server counts
  of parts        the median of the parts' own, with an interval of 95% from 6 parts on: where that is wide the
                  machine's noise decides; take 20 parts or more
  tokens/s        prompts and answers, while requests were under way
  model's CPU s   of the processor, by the thread that runs the model, hooks included, until all was stored
  '               over the first side's

examples
  python -m bench.serving conversation_trace.jsonl                      # about eight minutes
  python -m bench.serving trace.jsonl --loading always --others         # our policies side by side
  python -m bench.serving trace.jsonl --requests 40 --rounds 2          # a look, two minutes

exit status: 0 done, 1 a server or a request failed, 2 wrong usage, 130 interrupted
"""
WARM_UP = ScaledRequest(0.0, tuple(range(200)), 4)


class Bench:
    """The servers of one run. Everything they write lies in ``directory``, which is removed at the end."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        self._directory = directory
        self._progress = progress
        self._servers = contextlib.ExitStack()
        self._model: Path | None = None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *raised: Any) -> None:
        with self.step("stop the servers"):
            self._servers.__exit__(*raised)

    @contextlib.contextmanager
    def step(self, description: str, total: int | None = None) -> Iterator[Any]:
        """Shows a progress bar. Yields what to call after each of ``total``."""
        task = self._progress.add_task(description, total=total or 1)
        yield lambda: self._progress.advance(task)
        if total is None:
            self._progress.advance(task)

    def start(self, side: Side, sizes: Sizes) -> Running:
        """Its server, which has served one request and lives as long as the bench."""
        place = Path(tempfile.mkdtemp(dir=self._directory))
        with self.step(f"start: {side.name}"):
            started = server(side, self._made_model(), sizes, place)
            api = self._servers.enter_context(started)
            part = play(api, [WARM_UP])
            if part.errors:
                raise ServerError(f"{side.name}: {part.errors[0]}")
        assert started.group is not None
        return Running(side, api, started.group)

    def _made_model(self) -> Path:
        if self._model is None:
            models = importlib.import_module("tools.tiny_model")  # untyped
            self._model = models.make_tiny_model(self._directory / "tiny", context_tokens=CONTEXT_TOKENS)
        assert self._model is not None
        return self._model


def compute_rate(api: ApiClient, trace: Sequence[TraceRequest], scale: Scale, seed: int) -> float:
    """Tokens a second of prompts and answers that all come at once. Empties the device cache afterwards."""
    requests = scale.requests(sample(trace, CALIBRATION_REQUESTS, seed), 0.0, seed)
    part = play(api, requests)
    if part.errors:
        raise ServerError(part.errors[0])
    api.reset_prefix_cache()
    return part.num_tokens / part.seconds


def make_plan(trace: Sequence[TraceRequest], scale: Scale, rate: float, arguments: argparse.Namespace) -> Plan:
    """As many requests as the wanted seconds allow at that rate, and arrivals at the wanted load."""
    mean = sum(map(scale.num_tokens, trace)) / len(trace)
    wanted = arguments.requests or max(FEWEST_REQUESTS, int(rate * arguments.seconds / mean))
    chosen = sample(trace, wanted, arguments.seed)
    seconds = sum(map(scale.num_tokens, chosen)) / rate / arguments.load
    requests = scale.requests(chosen, seconds, arguments.seed)
    return Plan(tuple(requests), arguments.rounds, reuse(requests, MATCH_UNIT), rate)


def serve(bench: Bench, plan: Plan, servers: Sequence[Running]) -> list[Outcome]:
    """Sends all parts of the trace through all sides in turns. Another side begins each round.

    Raises ServerError if every request of a part fails.
    """
    outcomes = [Outcome(running.side) for running in servers]
    before = [running.api.settled_metrics() for running in servers]
    for number, part in enumerate(parts(plan.requests, plan.rounds)):
        for place in range(len(servers)):
            turn = (number + place) % len(servers)
            running, outcome = servers[turn], outcomes[turn]
            with bench.step(f"part {number + 1} of {plan.rounds}: {running.side.name}", len(part)) as answered:
                used = running.cpu_seconds()
                served = play(running.api, part, answered)
                if not served.served:
                    raise ServerError(f"{running.name} answers nothing: {served.errors[0]}")
                outcome.parts.append(served)
                running.settle()
                outcome.cpu_s += running.cpu_seconds() - used
    for outcome, running, metrics in zip(outcomes, servers, before, strict=True):
        grown = Interval(metrics, running.api.settled_metrics())
        outcome.external = int(grown.amount("vllm:external_prefix_cache_hits_total"))
        loaded = grown.by_label("vllm:kv_connector_loaded_tokens_total", CONNECTOR)
        outcome.by_connector = {name: int(tokens) for name, tokens in loaded.items()}
    return outcomes


def run_trace(bench: Bench, arguments: argparse.Namespace) -> tuple[str, dict[str, Any], int]:
    """The text to print, what ``--json`` gets, and how many requests failed. Raises TraceError, ServerError."""
    trace = read_trace(arguments.trace)
    scale = Scale(arguments.block_tokens, CONTEXT_TOKENS)
    sides = chosen_sides(arguments)
    first = bench.start(sides[0], Sizes(arguments.device_blocks, 0, 0))
    with bench.step("measure what computing takes"):
        rate = compute_rate(first.api, trace, scale, arguments.seed + 1)
    plan = make_plan(trace, scale, rate, arguments)
    shares = [int(plan.distinct_bytes / share) for share in (arguments.cpu_share, arguments.disk_share)]
    sizes = Sizes(arguments.device_blocks, *shares)
    servers = [first, *(bench.start(side, sizes) for side in sides[1:])]
    outcomes = serve(bench, plan, servers)
    text = described(plan, sizes) + "\n\n" + table(COLUMNS, rows(outcomes, plan))
    errors = [f"{one.side.name}: {error}" for one in outcomes for error in one.errors]
    return "\n".join([text, *errors[:5]]), as_json(outcomes, plan, sizes), len(errors)


def chosen_sides(arguments: argparse.Namespace) -> list[Side]:
    """Without a connector first: the others are compared with it."""
    others = [THIRD_PARTIES[name] for name in arguments.others]
    if arguments.lmcache is not None:
        others.append(lmcache(arguments.lmcache))
    return [NONE, *ours(arguments.policies, arguments.loading), *others]


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argument's type that takes numbers above 0."""

    def parse_number(text: str) -> float:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    parse_number.__name__ = f"positive {kind.__name__}"
    return parse_number


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m bench.serving",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=EPILOG,
    )
    made.add_argument("trace", type=Path, help="a file of the Mooncake format")
    made.add_argument(
        "--policies",
        nargs="+",
        default=["lru", "learned"],
        metavar="NAME",
        help="values of eviction_policy: a server with our two tiers for each (default: lru learned)",
    )
    made.add_argument(
        "--loading",
        nargs="+",
        choices=LOADING,
        default=list(LOADING),
        help="when our tiers load: measured (load_weight auto: when that is expected to be faster than computing) and "
        "always; a server for each (default: both)",
    )
    made.add_argument(
        "--others", nargs="*", choices=THIRD_PARTIES, default=list(THIRD_PARTIES), help="vLLM's own (default: both)"
    )
    made.add_argument(
        "--lmcache",
        type=Path,
        metavar="DIR",
        help="where lmcache 0.5.6 is unpacked (pip install --target DIR --no-deps lmcache==0.5.6); else not run",
    )
    numbers: tuple[tuple[str, type[int] | type[float], float | None, str], ...] = (
        ("--seconds", float, 45.0, "what computing all prompts of one side takes, without a tier"),
        ("--requests", int, None, "so many instead; two machines then serve the same requests"),
        ("--load", float, 0.7, "arriving tokens over those that a server without a tier computes at most"),
        ("--rounds", int, 6, "parts of the trace"),
        ("--block-tokens", int, 128, "what is left of a trace's block of 512 tokens"),
        ("--device-blocks", int, 48, "of vLLM's own KV cache"),
        ("--cpu-share", float, 8.0, "CPU tiers hold one part in so many of all that the run could store"),
        ("--disk-share", float, 2.0, "the same of our disk tier"),
    )
    for name, kind, default, text in numbers:
        made.add_argument(
            name, type=positive(kind), default=default, help=f"{text} (default: {default or 'as --seconds says'})"
        )
    made.add_argument("--seed", type=int, default=0, help="which sessions of the trace (default: %(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, each request's too")
    made.add_argument("--directory", type=Path, metavar="DIR", help="where disk tiers and logs go (default: TMPDIR)")
    return made


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Runs everything. Returns the number of failed requests."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as directory,
        Progress(*columns, console=console) as progress,
        Bench(Path(directory).resolve(), progress) as bench,
    ):
        text, figures, num_failed = run_trace(bench, arguments)
    print(text)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    return num_failed


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return status_of(lambda console: run(arguments, console))


if __name__ == "__main__":
    interrupt_at_ending_signals()
    sys.exit(main())
