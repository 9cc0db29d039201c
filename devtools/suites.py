# SPDX-License-Identifier: Apache-2.0
"""The suites of tests: what each runs. CONTRIBUTING.md says what each proves, and whose changes want it.

``make test`` runs ``product``. ``make test SUITE=faults`` runs another one, ``make test-all`` all of them.

A suite is the tests with its marker, and then its commands. What has no marker of a suite is in ``product``.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

_AT_ONCE = 2
"""Tests of a suite, or suites: an engine keeps one core busy."""
ENGINES_SHARE = {
    "OMP_WAIT_POLICY": "passive",
    "NUMBA_CACHE_DIR": str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "numba"),
}
"""What runs engines has these variables, unless the user says otherwise. Threads of torch that spin while they wait
would take the time of another engine's that work. Nor does each engine compile the same kernels."""
_LOGS = Path(".suites")
_TAIL_LINES = 60
_SAID_EVERY_S = 60.0
_TINY = ".faults/tiny"
_ADAPTED = ".faults/adapted"

Command = tuple[str, ...]
"""A Python module and its arguments."""


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    commands: tuple[Command, ...] = ()
    has_tests: bool = True
    environment: dict[str, str] = field(default_factory=dict)


PRODUCT = Suite("product")
OTHERS = (
    Suite("engines"),
    Suite("models", (("tests.matrix",),), environment={"VLLM_CPU_KVCACHE_SPACE": "1"}),
    Suite(
        "faults",
        (
            ("tools.tiny_model", _TINY),
            ("tests.multi_connector.matrix", _TINY),
            ("tests.multi_connector.churn", _TINY, "--requests", "1000"),
            ("tests.multi_connector.report_fuzz", "--seeds", "300"),
        ),
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
    Suite(
        "crash",
        (
            ("tests.tiers.disk.crash", "--kills", "500", "--seed", "1"),
            ("tests.tiers.disk.fuzz", "--mutations", "10000", "--seed", "1"),
            ("tests.tiers.disk.catalogue.crash", "--kills", "500", "--seed", "1"),
            ("tests.offloading.crash", "--kills", "200", "--seed", "1"),
            ("tests.tiers.disk.catalogue.fuzz", "--mutations", "5000", "--seed", "1"),
        ),
        has_tests=False,
    ),
    Suite("patches"),
    Suite(
        "upstream",
        (("devtools.upstream_tests", *(["--source", source] if (source := os.environ.get("SOURCE")) else [])),),
        environment={"VLLM_SOURCE": str(Path(".upstream").absolute())},
    ),
    Suite("benchmarks"),
    Suite(
        "adapters",
        (("tools.tiny_model", _ADAPTED), ("tests.engine.adapter_churn", _ADAPTED, "--steps", "80")),
        has_tests=False,
    ),
    Suite("poison", (("devtools.poison_fuzz", "--seeds", "500", "--jobs", "2"),), has_tests=False),
    Suite("dashboards"),
    Suite("compiled"),
)
SUITES = {suite.name: suite for suite in (PRODUCT, *OTHERS)}


def markers(suite: Suite, also: str = "") -> str:
    """pytest's ``-m``: the suite's tests, of those with ``also``."""
    others = " or ".join(other.name for other in OTHERS if other.has_tests)
    chosen = f"not ({others})" if suite is PRODUCT else suite.name
    return f"({chosen}) and ({also})" if also else chosen


def steps(suite: Suite, also: str = "", at_once: int = _AT_ONCE) -> list[Command]:
    """What runs the suite, in order. Commands come first: a test may need what they leave. A file's tests stay
    together, because they share engines."""
    together = ("-n", str(at_once), "--dist", "loadfile", "--no-loadscope-reorder")
    tests = [("pytest", *together, "-m", markers(suite, also))] if suite.has_tests else []
    return [*suite.commands, *tests]


def run_one(suite: Suite, also: str = "") -> int:
    """Shown as it runs; the first status that is not 0."""
    return next((status for step in steps(suite, also) if (status := _run(step, suite.environment))), 0)


def run_all() -> int:
    """Two suites at a time with a log each, and of each one test at a time: no core waits for the other's longest
    file. The longest suite comes first."""
    began = time.monotonic()
    _LOGS.mkdir(exist_ok=True)
    for name in SUITES:
        _log_of(name).write_text("")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        runs = {name: pool.submit(_run_logged, suite) for name, suite in SUITES.items()}
        while wait(runs.values(), timeout=_SAID_EVERY_S).not_done:
            for name in [name for name, run in runs.items() if run.running()]:
                print(f"    {name}: {_last_line(_log_of(name))}", flush=True)
    outcomes = {name: run.result() for name, run in runs.items()}
    failed = [name for name, status in outcomes.items() if status]
    print(f"{len(outcomes)} suites in {(time.monotonic() - began) / 60:.0f} minutes; failed: {failed or 'none'}")
    return 1 if failed else 0


def _log_of(name: str) -> Path:
    return _LOGS / f"{name}.log"


def _last_line(log: Path) -> str:
    """The last one that is whole."""
    return log.read_text(errors="replace").rpartition("\n")[0].rpartition("\n")[2]


def _run_logged(suite: Suite) -> int:
    began, log, status = time.monotonic(), _log_of(suite.name), 0
    print(f"{suite.name}: begins; its log is {log}", flush=True)
    with log.open("w") as output:
        for step in steps(suite, at_once=1):
            if status := _run(step, suite.environment, output.fileno()):
                break
    print(f"{suite.name}: {f'failed ({status})' if status else 'passed'}, {time.monotonic() - began:.0f} s", flush=True)
    if status:
        print("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]), flush=True)
    return status


def _run(step: Command, environment: dict[str, str], output: int | None = None) -> int:
    """The status of one step; its process is ended with this one's Ctrl-C, which the terminal sends to both."""
    command = [sys.executable, "-m", *step]
    variables = ENGINES_SHARE | os.environ | environment
    return subprocess.run(command, env=variables, stdout=output, stderr=output).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=[*SUITES, "all"], default="product", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="MARKER", help="those of its tests, say processor")
    chosen = parser.parse_args(arguments)
    return run_all() if chosen.suite == "all" else run_one(SUITES[chosen.suite], chosen.only)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
