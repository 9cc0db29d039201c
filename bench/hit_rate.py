# SPDX-License-Identifier: Apache-2.0
"""How much of its prompts a tier restores, by policy and size: ``python -m bench.hit_rate TRACE...``.

Replays traces through one tier with the planner, the index and the policies that serve. No model, no bytes; each
request is served at its time in the trace and takes none. A TRACE is a file as in Mooncake's FAST'25 release, say
conversation_trace.jsonl (repository kvcache-ai/Mooncake, folder FAST25-release/traces), or a generated workload, say
chat:1 (bench/workloads.py). W is the size of all distinct attention of a trace.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.progress import track

from bench.catalogue_order import CatalogueOrder
from bench.geometries import DEFAULT_MODEL, MODELS
from bench.hit_replay import Clock, HitReplay
from bench.measure import table
from bench.replay_tiers import IndexShelf
from bench.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace, sharable_tokens
from bench.workloads import WORKLOADS, generate
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

STEP_TOKENS = 8192
POLICIES: dict[str, Callable[[Clock, int], EvictionPolicy[Entry]]] = {
    "lru": lambda *_: LeastRecentlyUsed(),
    "learned": lambda clock, _: LearnedEviction(clock),
    "lru on disk": partial(CatalogueOrder, ranks=False),
    "learned on disk": partial(CatalogueOrder, ranks=True),
}
"""By the trace's clock and the capacity. On disk: as a disk tier's catalogue evicts."""
BUDGETS = ("64", "32", "16", "8", "4", "unlimited")


@dataclass(frozen=True, slots=True)
class Case:
    """One replay. ``budget``: N for W/N, or "unlimited"."""

    trace: str
    policy: str
    budget: str
    model: str = DEFAULT_MODEL
    speculative_tokens: int = 0
    num_requests: int | None = None


class Row(msgspec.Struct, frozen=True):
    """What one replay gave. Shares are of all prompt tokens; ``lost`` by the reasons that the metrics have too."""

    trace: str
    policy: str
    budget: str
    restored: float
    lost: dict[str, float]
    evicted_objects: int


def requests_of(case: Case) -> list[TraceRequest]:
    """Raises TraceError, and OSError if the file cannot be read."""
    name, _, seed = case.trace.partition(":")
    is_generated = name in WORKLOADS
    found = generate(name, int(seed or 1)) if is_generated else read_trace(Path(case.trace))
    return found[: case.num_requests]


def distinct_bytes(requests: Sequence[TraceRequest], token_bytes: float) -> int:
    """W: the attention of all distinct blocks."""
    return int(len({block for request in requests for block in request.block_ids}) * BLOCK_TOKENS * token_bytes)


def replay(case: Case, requests: Sequence[TraceRequest]) -> Row:
    geometry = MODELS[case.model].geometry(BLOCK_TOKENS)
    whole_bytes = distinct_bytes(requests, geometry.token_bytes)
    capacity = None if case.budget == "unlimited" else int(whole_bytes / float(case.budget))
    clock = Clock()
    policy = POLICIES[case.policy](clock, sys.maxsize if capacity is None else capacity)
    policy.serve(geometry)
    shelf = IndexShelf(capacity, policy)
    one = HitReplay(geometry, shelf, clock, STEP_TOKENS, case.speculative_tokens, last_block=True)
    restored = total = 0
    lost: Counter[str] = Counter()
    for request in requests:
        served = one.serve(request)
        total += served.num_tokens
        restored += served.num_restored
        lost.update({reason.value: tokens for reason, tokens in served.lost.items()})
    shares = {reason: tokens / total for reason, tokens in sorted(lost.items())}
    return Row(case.trace, case.policy, case.budget, restored / total, shares, len(shelf.evicted))


def _replay_alone(case: Case) -> Row:
    return replay(case, requests_of(case))


def replay_all(cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Rows in the order of ``cases``."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_replay_alone, cases)


def share_table(rows: Sequence[Row], budgets: Sequence[str], policies: Sequence[str], bound: float) -> str:
    """The share restored by policy and budget, and the mean ratio to LRU over the budgets that have a limit."""
    shares = {(row.policy, row.budget): row.restored for row in rows}
    limited = [budget for budget in budgets if budget != "unlimited" and float(budget) >= 8]
    body = []
    for policy in policies:
        cells = [f"{shares[policy, budget]:.4f}" for budget in budgets]
        ratios = [shares[policy, b] / shares["lru", b] for b in limited if shares.get(("lru", b))]
        body.append([policy, *cells, f"{fmean(ratios):.3f}" if ratios else ""])
    body.append(["a state everywhere", *("" for _ in budgets[1:]), f"{bound:.4f}", ""])
    names = [budget if budget == "unlimited" else f"W/{budget}" for budget in budgets]
    columns = ["policy", *names, "over lru, to W/8"]
    return table(columns, body)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.hit_rate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("traces", nargs="+", metavar="TRACE", help="a .jsonl file, or a workload and seed such as chat:1")
    made.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, metavar="NAME")
    made.add_argument(
        "--budgets", nargs="+", default=list(BUDGETS), metavar="N", help="the tier holds W/N, or unlimited"
    )
    made.add_argument("--model", choices=MODELS, default=DEFAULT_MODEL, help="whose bytes (default: %(default)s)")
    made.add_argument("--speculative", type=int, default=0, metavar="TOKENS", help="a snapshot about every TOKENS too")
    made.add_argument("--requests", type=int, metavar="N", help="the first N requests (W is theirs)")
    made.add_argument("--jobs", type=int, default=1, help="replays at once, a process each")
    made.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return made


def check(made: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the process where numbers cannot work."""
    sizes = [one for one in arguments.budgets if one != "unlimited"]
    if not all(one.replace(".", "", 1).isdecimal() and float(one) > 0 for one in sizes):
        made.error("--budgets takes numbers above 0, N for W/N, or unlimited")
    if arguments.requests is not None and arguments.requests < 1:
        made.error("--requests takes a number from 1 on")
    for trace in arguments.traces:
        name, _, seed = trace.partition(":")
        if name in WORKLOADS and seed and not seed.isdecimal():
            made.error(f"the seed of {trace} must be a whole number, such as {name}:1")


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(trace, policy, budget, arguments.model, arguments.speculative, arguments.requests)
        for trace in arguments.traces
        for budget in arguments.budgets
        for policy in arguments.policies
    ]


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    arguments = made.parse_args(argv)
    check(made, arguments)
    try:
        cases = cases_of(arguments)
        all_requests = {trace: requests_of(replace(cases[0], trace=trace)) for trace in arguments.traces}
    except (OSError, TraceError) as error:
        made.error(str(error))
    console = Console(stderr=True)
    replays = replay_all(cases, arguments.jobs)
    rows = list(track(replays, "replaying", len(cases), console=console, disable=not console.is_terminal))
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.encode(rows) + b"\n")
    else:
        for text in _texts(arguments, rows, all_requests):
            print(text + "\n")
    return 0


def _texts(
    arguments: argparse.Namespace, rows: Sequence[Row], all_requests: dict[str, list[TraceRequest]]
) -> Iterable[str]:
    geometry = MODELS[arguments.model].geometry(BLOCK_TOKENS)
    for trace, requests in all_requests.items():
        whole = distinct_bytes(requests, geometry.token_bytes)
        num_tokens = sum(request.num_tokens for request in requests)
        yield f"{Path(trace).name}: {len(requests)} requests, {num_tokens} prompt tokens, W = {whole / 1e9:.0f} GB"
        bound = sharable_tokens(requests) / num_tokens
        of_trace = [row for row in rows if row.trace == trace]
        yield share_table(of_trace, arguments.budgets, arguments.policies, bound)


if __name__ == "__main__":
    sys.exit(main())
