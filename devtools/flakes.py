# SPDX-License-Identifier: Apache-2.0
"""Looks for tests that fail by chance: runs a suite again and again, each time with its files in another order.

``python -m devtools.flakes --runs 10``
``python -m devtools.flakes --runs 5 --load busy``          beside a busy loop for each core
``python -m devtools.flakes --runs 5 --processor avx2``     as on a lesser processor

It lists each failure with the seed of the order and the log. ``--runs 1 --seed N`` has the order of seed N again.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOGS = Path(".flakes")


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


def run(chosen: argparse.Namespace, seed: int) -> str:
    """``make test`` as a user runs it, in the order of ``seed``. Says what failed; empty if nothing did."""
    log = _LOGS / f"{chosen.suite}-{chosen.load}-{chosen.processor or 'own'}-{seed}.log"
    order = f"--random-order-bucket=module --random-order-seed={seed}"
    command = ["make", "test", f"SUITE={chosen.suite}", *([f"PROCESSOR={chosen.processor}"] * bool(chosen.processor))]
    began = time.monotonic()
    with log.open("w") as output, load(chosen.load):
        environment = os.environ | {"PYTEST_ADDOPTS": order}
        status = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    text = log.read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    ended = re.findall(r"^=+ (.*\d (?:passed|failed|error).*) =+$|^(\d+ (?:passed|failed).*)$", text, re.MULTILINE)
    said = " ".join(ended[-1]).strip() if ended else "no test ended"
    print(f"seed {seed}: {said}, make said {status}, {(time.monotonic() - began) / 60:.1f} minutes, {log}", flush=True)
    return " ".join(failed) or ("make failed" if status else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count up")
    parser.add_argument("--suite", default="product", help="as in make test SUITE=NAME; default: %(default)s")
    parser.add_argument("--load", choices=("none", "busy"), default="none", help="beside it; default: %(default)s")
    parser.add_argument("--processor", help="as in make test PROCESSOR=avx2")
    chosen = parser.parse_args(arguments)
    _LOGS.mkdir(exist_ok=True)
    failures: dict[int, str] = {}
    try:
        for seed in range(chosen.seed, chosen.seed + chosen.runs):
            failures[seed] = run(chosen, seed)
    except KeyboardInterrupt:
        print(f"broken off after {len(failures)} of {chosen.runs} runs")
    wrong = {seed: failed for seed, failed in failures.items() if failed}
    for seed, failed in wrong.items():
        print(f"seed {seed}: {failed}")
    print(f"{len(wrong)} of {len(failures)} runs failed")
    return 1 if wrong or len(failures) < chosen.runs else 0


if __name__ == "__main__":
    sys.exit(main())
