# SPDX-License-Identifier: Apache-2.0
"""Looks for tests that fail by chance: runs a suite again and again, each time with its files in another order.

``python -m devtools.flakes --runs 10``
``python -m devtools.flakes --runs 5 --load busy``          beside a busy loop for each core
``python -m devtools.flakes --runs 5 --processor avx2``     as on a lesser processor

It lists each failure with the seed of the order and the log. ``--runs 1 --seed N`` has the order of seed N again.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from devtools.suites import SUITES

_LOGS = Path(".flakes")
_LOADS = ("none", "busy")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. ``failed`` are the ids of tests; ``status`` is that of ``make``."""

    seed: int
    log: Path
    seconds: float
    status: int
    num_tests: int
    failed: list[str]

    def __str__(self) -> str:
        said = f"{len(self.failed)} of {self.num_tests} failed" if self.failed else f"{self.num_tests} passed"
        wrong = " but make failed" if self.status and not self.failed else ""
        return f"seed {self.seed}: {said}{wrong} in {self.seconds / 60:.1f} minutes, {self.log}"


@contextmanager
def load(kind: str) -> Iterator[None]:
    """A busy loop for each core, or nothing."""
    count = (os.cpu_count() or 1) if kind == "busy" else 0
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(suite: str, seed: int, kind: str, processor: str | None) -> Outcome:
    """``make test`` as a user runs it, in the order of ``seed``."""
    _LOGS.mkdir(exist_ok=True)
    stem = _LOGS / f"{suite}-{kind}-{processor or 'own'}-{seed}"
    log, results = stem.with_suffix(".log"), stem.with_suffix(".xml")
    results.unlink(missing_ok=True)
    order = f"--random-order-bucket=module --random-order-seed={seed} --junitxml={results.absolute()}"
    command = ["make", "test", f"SUITE={suite}", *([f"PROCESSOR={processor}"] if processor else [])]
    began = time.monotonic()
    with log.open("w") as output, load(kind):
        status = subprocess.run(
            command, env=os.environ | {"PYTEST_ADDOPTS": order}, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    names, failed = _read(results)
    return Outcome(seed, log, time.monotonic() - began, status, len(names), failed)


def _read(results: Path) -> tuple[list[str], list[str]]:
    """All tests that ran, and those that failed. A run that was broken off has written none."""
    if not results.exists():
        return [], []
    cases = list(ElementTree.parse(results).iter("testcase"))
    names = [f"{case.get('classname')}::{case.get('name')}" for case in cases]
    wrong = [case.find("failure") is not None or case.find("error") is not None for case in cases]
    return names, [name for name, is_wrong in zip(names, wrong, strict=True) if is_wrong]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count up")
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="product", help="default: %(default)s")
    parser.add_argument("--load", choices=_LOADS, default="none", help="what runs beside it; default: %(default)s")
    parser.add_argument("--processor", help="as in make test PROCESSOR=avx2")
    chosen = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    try:
        for seed in range(chosen.seed, chosen.seed + chosen.runs):
            outcomes.append(run(chosen.suite, seed, chosen.load, chosen.processor))
            print(outcomes[-1], flush=True)
    except KeyboardInterrupt:
        print(f"broken off after {len(outcomes)} of {chosen.runs} runs")
    for name in sorted({name for outcome in outcomes for name in outcome.failed}):
        seeds = [outcome.seed for outcome in outcomes if name in outcome.failed]
        print(f"{name}: failed in {len(seeds)} of {len(outcomes)} runs, seeds {seeds}")
    wrong = sum(outcome.status != 0 for outcome in outcomes)
    print(f"{wrong} of {len(outcomes)} runs failed")
    return 1 if wrong or len(outcomes) < chosen.runs else 0


if __name__ == "__main__":
    sys.exit(main())
