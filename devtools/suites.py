# SPDX-License-Identifier: Apache-2.0
"""The suites of tests: what each proves, the rooms whose changes run it, and how it is run.

``make test`` runs ``product``. ``make test SUITE=faults`` runs another one, ``make test-all`` all of them.

A suite is the tests with its marker, and then its commands. What has no marker of a suite is in ``product``.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_PYTEST = ("pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""Two at a time: an engine keeps one core busy. A file's tests stay together, because they share engines."""
_LOGS = Path(".suites")
_AT_ONCE = 2
_TAIL_LINES = 60
_NO_TESTS = 5
"""Exit status of pytest."""
_TINY = ".faults/tiny"
_ADAPTED = ".faults/adapted"
_UPSTREAM = ".upstream"

Command = tuple[str, ...]
"""A Python module and its arguments."""


@dataclass(frozen=True, slots=True)
class Suite:
    """``rooms`` are paths: who changes something there runs this suite beside ``product``."""

    name: str
    proves: str
    rooms: tuple[str, ...]
    commands: tuple[Command, ...] = ()
    has_tests: bool = True
    environment: dict[str, str] = field(default_factory=dict)


PRODUCT = Suite("product", "each promise of README and docs once, and all that runs in milliseconds", ())
OTHERS = (
    Suite(
        "engines",
        "the same promises with other dtypes, step sizes, schedulers, model runners, and in random workloads",
        ("vllm_overlay/connector", "vllm_overlay/offloading", "vllm_overlay/planner", "vllm_overlay/transfer"),
    ),
    Suite(
        "faults",
        "each kind of fault, at each hook and in each rank: the engine lives and its answers are right",
        ("vllm_overlay/multi_connector", "vllm_overlay/connector", "vllm_overlay/tiers"),
        (
            ("tools.tiny_model", _TINY),
            ("tests.multi_connector.matrix", _TINY),
            ("tests.multi_connector.churn", _TINY, "--requests", "1000"),
            ("tests.multi_connector.report_fuzz", "--seeds", "300"),
        ),
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
    Suite(
        "patches",
        "each patch is needed and does what it says, on vLLM's own scheduler and in engines",
        ("patches", "vllm_overlay/patching", "tools/apply_patches.py"),
    ),
    Suite(
        "models",
        "every model of docs/models.md in real engines, and its list anew",
        ("vllm_overlay/planner", "vllm_overlay/transfer"),
        (("tests.matrix",),),
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
    Suite(
        "dashboards",
        "every panel and alert on a real Prometheus that scrapes a real server",
        ("dashboards", "vllm_overlay/metrics.py", "vllm_overlay/multi_connector"),
    ),
    Suite(
        "benchmarks",
        "benchmarks that start servers or compile run, and say what they measured",
        ("bench",),
    ),
    Suite(
        "crash",
        "700 kills and 15,000 damaged bytes of the disk tier: no wrong byte, nothing lost that was kept",
        ("vllm_overlay/tiers/disk", "vllm_overlay/offloading"),
        (
            ("tests.tiers.disk.crash", "--kills", "500", "--seed", "1"),
            ("tests.tiers.disk.fuzz", "--mutations", "10000", "--seed", "1"),
            ("tests.tiers.disk.catalogue.crash", "--kills", "500", "--seed", "1"),
            ("tests.offloading.crash", "--kills", "200", "--seed", "1"),
            ("tests.tiers.disk.catalogue.fuzz", "--mutations", "5000", "--seed", "1"),
        ),
        has_tests=False,
    ),
    Suite(
        "poison",
        "27,000 random schedules with failing loads on vLLM's scheduler",
        ("patches",),
        (("devtools.poison_fuzz", "--seeds", "1000", "--jobs", "2"),),
        has_tests=False,
    ),
    Suite(
        "adapters",
        "an adapter whose weights change at random under its name and path",
        ("vllm_overlay/connector/lora",),
        (("tools.tiny_model", _ADAPTED), ("tests.engine.adapter_churn", _ADAPTED, "--steps", "80")),
        has_tests=False,
    ),
    Suite("compiled", "engines that compile their model", ("vllm_overlay/transfer",)),
    Suite(
        "upstream",
        "vLLM's own tests of connectors, without the series and with it; SOURCE=path names its source distribution",
        ("patches", "vllm_overlay/multi_connector"),
        (("devtools.upstream_tests", *(["--source", source] if (source := os.environ.get("SOURCE")) else [])),),
        environment={"VLLM_SOURCE": str(Path(_UPSTREAM).absolute())},
    ),
)
SUITES = {suite.name: suite for suite in (PRODUCT, *OTHERS)}


def markers(suite: Suite, also: str = "") -> str:
    """pytest's ``-m``: the suite's tests, of those with ``also``."""
    others = " or ".join(other.name for other in OTHERS if other.has_tests)
    chosen = f"not ({others})" if suite is PRODUCT else suite.name
    return f"({chosen}) and ({also})" if also else chosen


def steps(suite: Suite, also: str = "") -> list[Command]:
    """What runs the suite, in order. Commands come first: a test may need what they leave."""
    tests = [(*_PYTEST, "-m", markers(suite, also))] if suite.has_tests else []
    return [*suite.commands, *tests]


def run_one(suite: Suite, also: str = "") -> int:
    """Shown as it runs; the first status that is not 0."""
    return next((status for step in steps(suite, also) if (status := _run(step, suite.environment))), 0)


def run_all() -> int:
    """All tests together, then the other commands, two suites at a time with a log each."""
    began = time.monotonic()
    _LOGS.mkdir(exist_ok=True)
    outcomes = {"tests": _run((*_PYTEST, "-m", "not upstream"), {})}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        chains = [suite for suite in OTHERS if suite.commands]
        outcomes |= zip((suite.name for suite in chains), pool.map(_run_logged, chains), strict=True)
    failed = [name for name, status in outcomes.items() if status]
    print(f"{len(outcomes)} parts in {(time.monotonic() - began) / 60:.0f} minutes; failed: {failed or 'none'}")
    return 1 if failed else 0


def _run_logged(suite: Suite) -> int:
    began, log, status = time.monotonic(), _LOGS / f"{suite.name}.log", 0
    print(f"{suite.name}: begins; its log is {log}", flush=True)
    chain = suite.commands if suite.name != "upstream" else steps(suite)
    with log.open("w") as output:
        for step in chain:
            if status := _run(step, suite.environment, output.fileno()):
                break
    print(f"{suite.name}: {f'failed ({status})' if status else 'passed'}, {time.monotonic() - began:.0f} s", flush=True)
    if status:
        print("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]), flush=True)
    return status


def _run(step: Command, environment: dict[str, str], output: int | None = None) -> int:
    """The status of one step; its process is ended with this one's Ctrl-C, which the terminal sends to both."""
    command = [sys.executable, "-m", *step]
    return subprocess.run(command, env=os.environ | environment, stdout=output, stderr=output).returncode


def table(suites: Iterable[Suite] = SUITES.values()) -> str:
    """As CONTRIBUTING.md has it."""
    rows = []
    for suite in suites:
        rooms = ", ".join(f"`{room}`" for room in suite.rooms) or "every change"
        rows.append(f"| `{suite.name}` | {suite.proves} | {rooms} |")
    return "\n".join(["| suite | what it proves | who runs it: a change of |", "| --- | --- | --- |", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "suite",
        nargs="?",
        choices=[*SUITES, "all"],
        default="product",
        metavar="SUITE",
        help="one of " + ", ".join([*SUITES, "all"]) + "; default: %(default)s",
    )
    parser.add_argument(
        "--only", default="", metavar="MARKER", help="of the suite's tests those with this marker, say processor"
    )
    parser.add_argument("--table", action="store_true", help="print the table of CONTRIBUTING.md, and run nothing")
    chosen = parser.parse_args(arguments)
    if chosen.table:
        print(table())
        return 0
    return run_all() if chosen.suite == "all" else run_one(SUITES[chosen.suite], chosen.only)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
