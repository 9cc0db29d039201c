# SPDX-License-Identifier: Apache-2.0
"""Time to the first token in scheduler steps, without the series and with it: ``python -m bench.prefill_steps``.

The same requests arrive at both schedulers (``bench/open_loop.py``), in processes of their own. No connector, no model.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.measure import percentile, table
from bench.open_loop import Point, Result, Run

REPOSITORY = Path(__file__).resolve().parent.parent
BUDGETS = (2048, 8192, 16384)
LOADS = (0.3, 0.5, 0.9)
GEOMETRIES = (
    *((544, None), (544, 32), (784, None), (784, 16), (1056, None), (1056, 48)),
    *((1152, None), (1152, 64), (2096, None), (2096, 16)),
)
"""N and a match unit that divides it."""
BAR = 1.01
"""With the series no p50 and no p95 is more than this many times what it is without."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one side at one point. Times are in steps."""

    mean: float
    p50: float
    p95: float
    num_steps: int
    use: float
    """The share of the budget that its steps use."""


def summarize(point: Point, results: Sequence[Result]) -> Summary:
    """All seeds in one."""
    times = [time for result in results for time in result.first_tokens]
    num_steps = sum(result.num_steps for result in results)
    use = sum(result.num_tokens for result in results) / num_steps / point.budget
    return Summary(statistics.fmean(times), percentile(times, 0.5), percentile(times, 0.95), num_steps, use)


def run_all(tree: Path, runs: Sequence[Run]) -> list[Result]:
    """Runs on the vLLM that lies in ``tree``. Raises RuntimeError if another one ran, or none."""
    command = [sys.executable, "-m", "bench.open_loop"]
    paths = {"PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}", "VLLM_PLUGINS": ""}
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **paths}
    lines = "".join(json.dumps(dataclasses.asdict(run)) + "\n" for run in runs)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    if done.returncode:
        raise RuntimeError(f"bench.open_loop on {tree} failed:\n{done.stderr[-3000:]}")
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers or not Path(answers[0]["vllm"]).is_relative_to(tree):
        raise RuntimeError(f"not the vLLM in {tree}, but {answers[0]['vllm'] if answers else 'none'}")
    return [Result(**answer) for answer in answers[1:]]


def is_within_bar(before: Summary, after: Summary) -> bool:
    return after.p50 <= BAR * before.p50 and after.p95 <= BAR * before.p95


def in_parts(points: Sequence[Point], num_parts: int) -> Iterator[Sequence[Point]]:
    """What one process does: it imports vLLM once."""
    size = -(-len(points) // num_parts)
    return (points[place : place + size] for place in range(0, len(points), size))


def measure(
    trees: Sequence[Path], points: Sequence[Point], seeds: int, requests: int, jobs: int
) -> list[list[Summary]]:
    """Each tree's summaries, in the order of the points."""

    def part(tree: Path, chosen: Sequence[Point]) -> list[Summary]:
        results = run_all(tree, [Run(point, seed, requests) for point in chosen for seed in range(seeds)])
        own = [results[place : place + seeds] for place in range(0, len(results), seeds)]
        return [summarize(point, one) for point, one in zip(chosen, own, strict=True)]

    with ThreadPoolExecutor(jobs) as pool:
        parts = list(in_parts(points, max(1, jobs // len(trees))))
        tasks = [[pool.submit(part, tree, chosen) for chosen in parts] for tree in trees]
        return [[summary for task in side for summary in task.result()] for side in tasks]


def rows(points: Sequence[Point], before: Sequence[Summary], after: Sequence[Summary]) -> Iterable[Sequence[object]]:
    for point, old, new in zip(points, before, after, strict=True):
        yield (
            point.budget,
            point.load,
            point.block_size,
            point.match_unit or "-",
            *(f"{getattr(old, name):.2f}" for name in ("mean", "p50", "p95")),
            *(f"{getattr(new, name):.2f}" for name in ("mean", "p50", "p95")),
            *(f"{getattr(new, name) / getattr(old, name):.3f}" for name in ("mean", "p50", "p95")),
            f"{old.num_steps} {new.num_steps}",
            f"{old.use:.2f} {new.use:.2f}",
            "" if is_within_bar(old, new) else "missed",
        )


COLUMNS = (
    *("budget", "load", "N", "unit", "mean", "p50", "p95", "mean'", "p50'", "p95'"),
    *("mean'/mean", "p50'/p50", "p95'/p95", "steps", "use", "bar"),
)


def trees() -> tuple[Path, Path]:
    """Directories that hold ``vllm/`` without the series, a copy in .benchmarks, and with it."""
    from devtools.upstream_tests import make_unpatched
    from vllm_overlay.patching.installed import installed_root

    after = installed_root()
    if after is None:
        raise SystemExit("no vLLM is installed: run `make setup`")
    return make_unpatched(REPOSITORY / ".benchmarks").resolve(), after.resolve()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefill_steps",
        description="Time to the first token without a connector, in scheduler steps, of the same arrivals on vLLM "
        f"without the series and with it ('). The bar: p50 and p95 at most {BAR} times those without it.",
        epilog="exit status: 0 the bar is met at every point, 1 it is missed, 2 wrong usage",
    )
    parser.add_argument("--requests", type=int, default=1500, help="of a seed (default: 1500)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--budget", type=int, action="append", help=f"default: {BUDGETS}; may be repeated")
    parser.add_argument("--load", type=float, action="append", help=f"default: {LOADS}; may be repeated")
    parser.add_argument("--block-size", type=int, action="append", help="default: all of this file; may be repeated")
    arguments = parser.parse_args(argv)
    geometries = [one for one in GEOMETRIES if one[0] in (arguments.block_size or [one[0]])]
    points = [
        Point(budget, load, block_size, unit)
        for budget, load, (block_size, unit) in product(
            arguments.budget or BUDGETS, arguments.load or LOADS, geometries
        )
    ]
    if not points:
        parser.error(f"--block-size is one of {sorted({one[0] for one in GEOMETRIES})}")
    before, after = measure(trees(), points, arguments.seeds, arguments.requests, arguments.jobs)
    print(table(COLUMNS, rows(points, before, after)))
    missed = sum(not is_within_bar(old, new) for old, new in zip(before, after, strict=True))
    print(f"\n{len(points) - missed} of {len(points)} points within the bar")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
