# SPDX-License-Identifier: Apache-2.0
"""A ladder for a machine with a GPU: from "do the operators load" to restores under CUDA graphs, rung by rung.

    python tools/gpu_smoke.py                    every rung, on the device that torch has
    python tools/gpu_smoke.py plain connector    these rungs alone
    python tools/gpu_smoke.py --device cpu       what means something on vLLM's CPU build
    python tools/gpu_smoke.py --budget 570 --json found.json   as many as go in so many seconds

Each rung runs in a process of its own with a time limit, is printed with its time, and may fail: the next one is tried
all the same. A rung that our connector refuses says the refusal's sentence. At the end a table. With --json a file has
what was found, from each rung on. What is there already is not run again, but for rungs that are named: so the same
line may be given until nothing is left.

Exit status 0: every rung passed, or means nothing on this device; 1: one failed or ran out of time; 2: wrong usage;
3: none failed, but our connector refused to start on some, or the budget was spent before all were run.
"""

import argparse
import contextlib
import faulthandler
import json
import math
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
_END_S = 10.0
LEAST_S = 20.0
"""A rung is not begun with less of the budget left."""


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"
    NOT_RUN = "not run"


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
    return 3 if verdicts & {Verdict.REFUSED, Verdict.NOT_RUN} else 0


def climb(name: str, model: Path, device: str, timeout_s: float, log_path: Path | None = None) -> Outcome:
    """One rung, in a process of its own. Kills it, and what it has started, after ``timeout_s``."""
    rung = RUNGS[name]
    if device == "cpu" and rung.why_not_cpu:
        return Outcome(name, Verdict.SKIPPED, 0.0, rung.why_not_cpu)
    command = [sys.executable, __file__, name, "--within", "--device", device, "--model", str(model)]
    started, is_late = time.monotonic(), False
    with log_path.open("w+") if log_path else tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
        seconds = time.monotonic() - started
        log.seek(0)
        lines = log.read().splitlines()
    for line in lines:
        if line.startswith(_RESULT):
            verdict, said = json.loads(line.removeprefix(_RESULT))
            return Outcome(name, Verdict(verdict), seconds, said)
    end = "\n".join(lines[-_LOG_LINES:])
    if is_late:
        return Outcome(name, Verdict.TIMED_OUT, seconds, f"after {timeout_s:.0f} s; its log ends:\n{end}")
    return Outcome(name, Verdict.FAILED, seconds, f"exit status {process.returncode}; its log ends:\n{end}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first: a rung may have a server, in a session of its own, which would keep the GPU's memory."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{name}: ended from outside"))
    faulthandler.register(signal.SIGTERM, sys.__stderr__, chain=True)  # its log says where it was
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
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="S", help="of all rungs together; default: none"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep what was found there, after each rung, and its log beside it"
    )
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser, started = _parser(), time.monotonic()
    arguments = parser.parse_args(argv)
    deadline = started + arguments.budget
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
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
        found = _read(arguments.json, device)
        for name in arguments.rungs or [name for name in RUNGS if name not in found]:
            print(f"{name}: {RUNGS[name].title}", flush=True)
            left_s = deadline - time.monotonic()
            if left_s < LEAST_S:
                print(f"    not run: {max(left_s, 0):.0f} s are left of --budget", flush=True)
                continue
            log_path = arguments.json and arguments.json.with_name(f"{arguments.json.stem}-{name}.log")
            found[name] = outcome = climb(name, model, device, min(arguments.timeout, left_s), log_path)
            print(f"    {outcome.verdict}, {outcome.seconds:.1f} s: {outcome.said}", flush=True)
            _write(arguments.json, device, found)
    wanted = arguments.rungs or list(RUNGS)
    outcomes = [found.get(name, Outcome(name, Verdict.NOT_RUN, 0.0, "the budget was spent")) for name in wanted]
    _print_table(outcomes, device)
    return exit_status(outcomes)


def _read(path: Path | None, device: str) -> dict[str, Outcome]:
    """What an earlier call has found on this device, by rung."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    outcomes = [Outcome(**{**one, "verdict": Verdict(one["verdict"])}) for one in found["rungs"]]
    return {outcome.rung: outcome for outcome in outcomes} if found["device"] == device else {}


def _write(path: Path | None, device: str, found: dict[str, Outcome]) -> None:
    """After each rung: a machine that is taken away leaves what it had found."""
    if path is not None:
        rungs = [asdict(outcome) for outcome in found.values()]
        path.write_text(json.dumps({"device": device, "rungs": rungs}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
