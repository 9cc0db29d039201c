# SPDX-License-Identifier: Apache-2.0
"""A ladder for a machine with a GPU: from "do the operators load" to restores under CUDA graphs, rung by rung.

    python tools/gpu_smoke.py                    every rung, on the device that torch has
    python tools/gpu_smoke.py plain connector    these rungs alone
    python tools/gpu_smoke.py --device cpu       what means something on vLLM's CPU build

Each rung runs in a process of its own with a time limit, is printed with its time, and may fail: the next one is tried
all the same. A rung that our connector refuses says the refusal's sentence. At the end a table, and with --json a file.

Exit status 0: every rung passed, or means nothing on this device; 1: one failed or ran out of time; 2: wrong usage;
3: none failed, but our connector refused to start on some.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.gpu_rungs import RUNGS

_RESULT = "RESULT "
_LOG_LINES = 12


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``said`` is what the rung found, or why it did not pass."""

    rung: str
    verdict: Verdict
    seconds: float
    said: str


def exit_status(outcomes: Sequence[Outcome]) -> int:
    verdicts = {outcome.verdict for outcome in outcomes}
    if verdicts & {Verdict.FAILED, Verdict.TIMED_OUT}:
        return 1
    return 3 if Verdict.REFUSED in verdicts else 0


def climb(name: str, model: Path, device: str, timeout_s: float) -> Outcome:
    """One rung, in a process of its own. Kills it, and what it has started, after ``timeout_s``."""
    rung = RUNGS[name]
    if device == "cpu" and rung.why_not_cpu:
        return Outcome(name, Verdict.SKIPPED, 0.0, rung.why_not_cpu)
    command = [sys.executable, __file__, name, "--within", "--device", device, "--model", str(model)]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        seconds = time.monotonic() - started
        log.seek(0)
        lines = log.read().splitlines()
    for line in lines:
        if line.startswith(_RESULT):
            verdict, said = json.loads(line.removeprefix(_RESULT))
            return Outcome(name, Verdict(verdict), seconds, said)
    end = "\n".join(lines[-_LOG_LINES:])
    if process.returncode == -signal.SIGKILL and seconds >= timeout_s:
        return Outcome(name, Verdict.TIMED_OUT, seconds, f"after {timeout_s:.0f} s; its log ends:\n{end}")
    return Outcome(name, Verdict.FAILED, seconds, f"exit status {process.returncode}; its log ends:\n{end}")


def refusal(error: BaseException) -> str:
    """The sentence with which our connector refused to start; empty when something else went wrong."""
    from vllm_overlay.config import ConfigError

    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ConfigError):
            return str(found)
        found = found.__cause__ or found.__context__
    return ""


def run_within(name: str, model: Path, device: str) -> None:
    """In the rung's process: its last word is its verdict. What an engine leaves behind is not waited for."""
    try:
        verdict, said = Verdict.PASSED, RUNGS[name].run(model, device)
    except Exception as error:
        sentence = refusal(error)
        verdict, said = Verdict.REFUSED if sentence else Verdict.FAILED, sentence or f"{type(error).__name__}: {error}"
        traceback.print_exc()
    print(f"\n{_RESULT}{json.dumps([verdict, said])}", flush=True)
    sys.stderr.flush()
    os._exit(0)


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_table(outcomes: Sequence[Outcome], device: str) -> None:
    print(f"\n{'rung':14}{'verdict':11}{'seconds':>8}  on {device}")
    for outcome in outcomes:
        print(f"{outcome.rung:14}{outcome.verdict:11}{outcome.seconds:8.1f}  {outcome.said.splitlines()[0][:160]}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help=f"default: all of {', '.join(RUNGS)}")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--model", type=Path, help="default: a tiny Qwen3.5 with random weights is made")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of each rung; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.rungs if name not in RUNGS]:
        parser.error(f"no rung is called {', '.join(unknown)}: known are {', '.join(RUNGS)}")
    device = _device(arguments.device)
    if arguments.within:
        run_within(arguments.rungs[0], arguments.model, device)
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
        model = arguments.model
        if model is None:
            from tools.tiny_model import make_tiny_model

            model = make_tiny_model(Path(scratch) / "tiny")
        outcomes = []
        for name in arguments.rungs or RUNGS:
            print(f"{name}: {RUNGS[name].title}", flush=True)
            outcomes.append(climb(name, model, device, arguments.timeout))
            print(f"    {outcomes[-1].verdict}, {outcomes[-1].seconds:.1f} s: {outcomes[-1].said}", flush=True)
    _print_table(outcomes, device)
    if arguments.json:
        found = {"device": device, "rungs": [asdict(outcome) for outcome in outcomes]}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
