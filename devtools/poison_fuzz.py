# SPDX-License-Identifier: Apache-2.0
"""Random schedules with failing loads on vLLM's real scheduler, and an oracle that knows wrong tokens; see --help."""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from devtools.poison.seed import COLUMNS, Column, run_seed

CHUNK = 50
BY_NAME = {column.name: column for column in COLUMNS}
HEAD = (
    "| column | wrong | steps | failed loads | requests failed | first problem |\n| --- | --- | --- | --- | --- | --- |"
)


def run_chunk(job: tuple[str, range]) -> tuple[dict[int, str], Counter[str]]:
    """The problems of some seeds of a column, and what happened on the way. Called in each process."""
    name, seeds = job
    problems: dict[int, str] = {}
    sums: Counter[str] = Counter()
    for seed in seeds:
        verdict = run_seed(seed, BY_NAME[name])
        sums.update(steps=verdict.num_steps, failed=verdict.num_failed_loads, errors=verdict.num_errors)
        if verdict.problem:
            problems[seed] = verdict.problem
    return problems, sums


def run_columns(
    columns: Sequence[Column], seeds: range, jobs: int
) -> Iterator[tuple[str, dict[int, str], Counter[str]]]:
    parts = [range(first, min(first + CHUNK, seeds.stop)) for first in range(seeds.start, seeds.stop, CHUNK)]
    with get_context("fork").Pool(jobs) as pool:
        results = pool.imap(run_chunk, [(column.name, part) for column in columns for part in parts])
        for column in columns:
            problems: dict[int, str] = {}
            sums: Counter[str] = Counter()
            for _ in parts:
                wrong, more = next(results)
                problems |= wrong
                sums += more
            yield column.name, problems, sums


def run(arguments: argparse.Namespace, columns: Sequence[Column]) -> int:
    if arguments.seed is not None:
        verdict = run_seed(arguments.seed, columns[0], verbose=arguments.verbose)
        print(*verdict.trace, f"WRONG: {verdict.problem}" if verdict.problem else "all is well", sep="\n")
        return 1 if verdict.problem else 0
    begin = time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    num_wrong = 0
    print(HEAD, flush=True)
    for name, wrong, sums in run_columns(columns, seeds, max(arguments.jobs, 1)):
        counts = f"{len(wrong)} of {arguments.seeds} | {sums['steps']} | {sums['failed']} | {sums['errors']}"
        example = f"--column {name} --seed {min(wrong)}: {wrong[min(wrong)][:110]}" if wrong else ""
        print(f"| {name} | {counts} | {example} |", flush=True)
        num_wrong += len(wrong)
    print(f"\n{num_wrong} wrong of {arguments.seeds * len(columns)} seeds, {time.monotonic() - begin:.0f} s")
    return 1 if num_wrong else 0


def _means(part: str, column: Column) -> bool:
    """A column's whole name is no part of another's."""
    return part == column.name if part in BY_NAME else part in column.name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Random requests, budgets, aborts, preemptions and failed loads on vLLM's real scheduler. An "
        "oracle in place of the model runner knows what each cache slot holds. A seed is wrong when a token was "
        "computed from what a failed load has left, when the scheduler raises or hangs, or when blocks leak.",
        epilog="The vLLM is the one that Python imports: PYTHONPATH names another, such as one without the series.\n"
        f"columns: {', '.join(BY_NAME)}\n\nexit status: 0 all is well, 1 a seed is wrong, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, help="of each column (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--column", action="append", help="a column, or the beginning or a part of its name; all without it"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--seed", type=int, help="only this seed of one column")
    parser.add_argument("--verbose", action="store_true", help="with --seed: each step of it")
    arguments = parser.parse_args(argv)
    wanted = arguments.column or [""]
    columns = [column for column in COLUMNS if any(_means(part, column) for part in wanted)]
    if not columns or (arguments.seed is not None and len(columns) != 1):
        parser.error(
            f"--column: allowed are (parts of) {', '.join(BY_NAME)}; --seed wants one, such as {COLUMNS[0].name}"
        )
    logging.disable(logging.CRITICAL)  # the scheduler warns of each failed load
    try:
        return run(arguments, columns)
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
