# SPDX-License-Identifier: Apache-2.0
"""How much of its prompts a tier restores, by policy and size: ``python -m bench.hit_rate TRACE...``.

Replays traces through one tier with the planner, the index and the policies that serve. No model, no bytes; each
request is served at its time in the trace and takes none. A TRACE is a file as in Mooncake's FAST'25 release, say
conversation_trace.jsonl (repository kvcache-ai/Mooncake, folder FAST25-release/traces), or a generated workload, say
chat:1 (bench/workloads.py). W is the size of all distinct attention of a trace.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.progress import track

from bench.baselines import BASELINES, Moment
from bench.catalogue_order import CatalogueOrder
from bench.future import Future
from bench.geometries import DEFAULT_MODEL, MODELS
from bench.hit_replay import Clock, HitReplay
from bench.measure import table
from bench.replay_tiers import IndexShelf
from bench.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace
from bench.workloads import WORKLOADS, generate
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction

FUTURE = "future"
LEARNED = "learned"
ON_DISK = {"lru on disk": False, "learned on disk": True}
"""As a disk tier's catalogue evicts; whether its engine ranks."""
POLICIES = ("lru", "arc", "s3-fifo", LEARNED, FUTURE)
BUDGETS = ("64", "32", "16", "8", "4", "unlimited")


@dataclass(frozen=True, slots=True)
class Case:
    """One replay. ``budget``: N for W/N, or "unlimited"; ``device``: the same of a device cache, or "" for none."""

    trace: str
    policy: str
    budget: str
    model: str = DEFAULT_MODEL
    block_tokens: int = BLOCK_TOKENS
    step_tokens: int = 8192
    speculative_tokens: int = 0
    last_block: bool = True
    device: str = ""
    num_requests: int | None = None
    seed: int = 0


class Row(msgspec.Struct, frozen=True):
    """What one replay gave. Shares are of all prompt tokens; ``lost`` by the reasons that the metrics have too."""

    trace: str
    policy: str
    budget: str
    restored: float
    local: float
    lost: dict[str, float]
    evicted_objects: int
    seconds: float


def requests_of(case: Case) -> list[TraceRequest]:
    """Raises TraceError, and OSError if the file cannot be read."""
    name, _, seed = case.trace.partition(":")
    is_generated = name in WORKLOADS
    found = generate(name, int(seed or 1)) if is_generated else read_trace(Path(case.trace), case.block_tokens)
    return found[: case.num_requests]


def distinct_bytes(requests: Sequence[TraceRequest], block_tokens: int, token_bytes: float) -> int:
    """W: the attention of all distinct blocks."""
    return int(len({block for request in requests for block in request.block_ids}) * block_tokens * token_bytes)


def capacity_of(budget: str, whole_bytes: int) -> int | None:
    return None if budget == "unlimited" else int(whole_bytes / float(budget))


def policy_of(case: Case, moment: Moment) -> EvictionPolicy[Entry]:
    if case.policy == LEARNED:
        return LearnedEviction(moment.clock, case.seed)
    if case.policy in ON_DISK:
        return CatalogueOrder(moment, ON_DISK[case.policy])
    return BASELINES[case.policy](moment)


def replay(case: Case, requests: Sequence[TraceRequest], future: Future) -> Row:
    started = time.perf_counter()
    geometry = MODELS[case.model].geometry(case.block_tokens)
    whole = distinct_bytes(requests, case.block_tokens, geometry.token_bytes)
    capacity = capacity_of(case.budget, whole)
    clock = Clock()
    moment = Moment(clock, sys.maxsize if capacity is None else capacity, future)
    policy = policy_of(case, moment)
    policy.serve(geometry)
    shelf = IndexShelf(capacity, policy)
    evicted = [0]

    def count(_: object) -> None:
        evicted[0] += 1

    shelf.evicted = count
    device = IndexShelf(capacity_of(case.device, whole)) if case.device else None
    stops = future.wanted_boundaries if case.policy == FUTURE else None
    one = HitReplay(geometry, shelf, clock, case.step_tokens, case.speculative_tokens, device, stops, case.last_block)
    restored = local = total = 0
    lost: Counter[str] = Counter()
    for place, request in enumerate(requests):
        moment.place = place
        served = one.serve(place, request)
        total += served.num_tokens
        restored += served.num_restored
        local += served.num_local
        lost.update({reason.value: tokens for reason, tokens in served.lost.items()})
    shares = {reason: tokens / total for reason, tokens in sorted(lost.items())}
    seconds = time.perf_counter() - started
    return Row(case.trace, case.policy, case.budget, restored / total, local / total, shares, evicted[0], seconds)


def _replay_alone(case: Case) -> Row:
    requests = requests_of(case)
    return replay(case, requests, Future(requests, case.block_tokens))


def replay_all(cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Rows in the order of ``cases``."""
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(_replay_alone, cases)
        return
    known: dict[str, tuple[list[TraceRequest], Future]] = {}
    for case in cases:
        if case.trace not in known:
            requests = requests_of(case)
            known[case.trace] = requests, Future(requests, case.block_tokens)
        yield replay(case, *known[case.trace])


def bound_share(requests: Sequence[TraceRequest], block_tokens: int) -> float:
    """The token bound: an unlimited tier with a state at every block."""
    return Future(requests, block_tokens).bound_tokens / sum(request.num_tokens for request in requests)


def budget_name(budget: str) -> str:
    return budget if budget == "unlimited" else f"W/{budget}"


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
    columns = ["policy", *map(budget_name, budgets), "over lru, to W/8"]
    return table(columns, body)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.hit_rate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("traces", nargs="+", metavar="TRACE", help="a .jsonl file, or a workload and seed such as chat:1")
    made.add_argument("--policies", nargs="+", default=list(POLICIES), choices=[*POLICIES, *ON_DISK], metavar="NAME")
    made.add_argument(
        "--budgets", nargs="+", default=list(BUDGETS), metavar="N", help="the tier holds W/N, or unlimited"
    )
    made.add_argument("--model", choices=MODELS, default=DEFAULT_MODEL, help="whose bytes (default: %(default)s)")
    made.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, help="tokens of one id of the trace")
    made.add_argument("--step", type=int, default=8192, help="tokens of a prefill step (default: %(default)s)")
    made.add_argument("--speculative", type=int, default=0, metavar="TOKENS", help="a snapshot about every TOKENS too")
    made.add_argument(
        "--last-block",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a snapshot at each prompt's last whole block too, as vLLM keeps one (default: yes)",
    )
    made.add_argument("--device", default="", metavar="N", help="a device cache of W/N in front (default: none)")
    made.add_argument("--requests", type=int, metavar="N", help="the first N requests (W is theirs)")
    made.add_argument("--seed", type=int, default=0, help="of the policy's draws")
    made.add_argument("--jobs", type=int, default=1, help="replays at once, a process each")
    made.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return made


def check(made: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the process where numbers cannot work."""
    sizes = [one for one in (*arguments.budgets, arguments.device) if one not in ("", "unlimited")]
    if not all(one.replace(".", "", 1).isdecimal() and float(one) > 0 for one in sizes):
        made.error("--budgets and --device take numbers above 0, N for W/N, or unlimited")
    if arguments.requests is not None and arguments.requests < 1:
        made.error("--requests takes a number from 1 on")
    for trace in arguments.traces:
        name, _, seed = trace.partition(":")
        if name in WORKLOADS and seed and not seed.isdecimal():
            made.error(f"the seed of {trace} must be a whole number, such as {name}:1")


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    base = Case(
        "",
        "",
        "",
        model=arguments.model,
        block_tokens=arguments.block_tokens,
        step_tokens=arguments.step,
        speculative_tokens=arguments.speculative,
        last_block=arguments.last_block,
        device=arguments.device,
        num_requests=arguments.requests,
        seed=arguments.seed,
    )
    return [
        replace(base, trace=trace, policy=policy, budget=budget)
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
    geometry = MODELS[arguments.model].geometry(arguments.block_tokens)
    for trace, requests in all_requests.items():
        whole = distinct_bytes(requests, arguments.block_tokens, geometry.token_bytes)
        num_tokens = sum(request.num_tokens for request in requests)
        yield f"{Path(trace).name}: {len(requests)} requests, {num_tokens} prompt tokens, W = {whole / 1e9:.0f} GB"
        bound = bound_share(requests, arguments.block_tokens)
        of_trace = [row for row in rows if row.trace == trace]
        yield share_table(of_trace, arguments.budgets, arguments.policies, bound)


if __name__ == "__main__":
    sys.exit(main())
