# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay verify``: on one's own model and settings, what is restored equals what is computed."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import show_table, shown, size
from vllm_overlay.config import ConfigError
from vllm_overlay.server.api_client import ApiClient
from vllm_overlay.verification.answers import Computed
from vllm_overlay.verification.comparison import Verdict, is_passed
from vllm_overlay.verification.verification import Result, compute, require_restart, restore

_LONGEST, _SEED = 8192, 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
Sends prompts that end a few tokens past a restore point, of lengths around a match unit, a chunk and a block. Each is
computed twice and hit in vLLM's device cache. Then it is restored with that cache emptied. Tokens and logprobs must be
those that were computed, or those of vLLM's own hit, to the last bit. Else they must be within --tolerance, and where a
token differs both must have been that nearly likely.

To see what a restart finds, save the answers, restart the server as you run it, and compare.

The server must have VLLM_SERVER_DEV_MODE=1 and --enable-prompt-tokens-details. It should serve nobody else meanwhile.
With data parallelism its first engine is asked.
VLLM_API_KEY is used if it is set. What is stored stays in the tiers, and no other request finds it. Where load_weight
is "auto", what is faster to compute is not restored, and neither passes nor fails.

examples:
  vllm-overlay verify http://127.0.0.1:8000 --save answers.json
  vllm-overlay verify http://127.0.0.1:8000 --against answers.json
"""
    parser.add_argument("url", metavar="URL", help="of a running server")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--save", type=Path, metavar="FILE", help="write what the server has computed")
    kept.add_argument(
        "--against", type=Path, metavar="FILE", help="compute nothing: compare with what an earlier run saved"
    )
    parser.add_argument("--model", default="", help="name in requests (default: the first that the server serves)")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=0.05, metavar="LOGPROB", help="0: equal bits (default: %(default)s)"
    )
    parser.add_argument("--longest", type=int, metavar="TOKENS", help=f"of a prompt (default: {_LONGEST})")
    parser.add_argument("--seed", type=int, help=f"of the prompts' tokens (default: {_SEED})")
    parser.add_argument("--json", action="store_true", help="one object on standard output")


def _tolerance(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < 10:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a difference of logprobs: give a number from 0, such as 0.05")


def _run(arguments: argparse.Namespace) -> int:
    computed, results = _verify(arguments)
    if arguments.json:
        print(json.dumps([_plain(result) for result in results], indent=2))
    else:
        _print(computed, results, arguments)
    return SOUND if is_passed(result.comparison.verdict for result in results) else PROBLEMS


def _verify(arguments: argparse.Namespace) -> tuple[Computed, list[Result]]:
    if arguments.against:
        if arguments.longest is not None or arguments.seed is not None:
            raise ConfigError("--longest and --seed are as in the run that saved: leave them out with --against")
        computed = Computed.read(arguments.against)
        api = ApiClient(arguments.url, arguments.model)
        require_restart(api, computed)
    else:
        if arguments.save:
            _require_place(arguments.save)
        api = ApiClient(arguments.url, arguments.model)
        longest = _LONGEST if arguments.longest is None else arguments.longest
        computed = compute(api, longest, arguments.seed or _SEED, _say)
        if arguments.save:
            computed.write(arguments.save)
    return computed, restore(api, computed, arguments.tolerance, _say)


def _require_place(path: Path) -> None:
    """Before minutes are spent. Raises ConfigError."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"--save {path} is there and is no file: give another name")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"--save {path} cannot be written: give a name in a directory that is there and is yours")


def _say(text: str) -> None:
    """A line of progress."""
    print(f"{shown(text)} ...", file=sys.stderr, flush=True)


def _plain(result: Result) -> dict[str, object]:
    return {
        "prompt": result.prompt.name,
        "restored_tokens": result.num_restored,
        "expected_tokens": result.prompt.boundary,
        "loaded_bytes": result.sources,
        "verdict": result.comparison.verdict,
        "difference": result.comparison.difference,
        "detail": result.comparison.detail,
    }


def _print(computed: Computed, results: Sequence[Result], arguments: argparse.Namespace) -> None:
    rows = [("prompt", "tokens", "loaded", "answer")]
    for result in results:
        loaded = ", ".join(f"{shown(name)} {size(num_bytes)}" for name, num_bytes in result.sources.items())
        rows.append((shown(result.prompt.name), str(result.num_restored), loaded or "nothing", _answer(result)))
    show_table("", rows, has_header=True)
    print(_verdict(results, arguments.tolerance))
    print(f"computed twice, {computed.num_equal} of {len(computed.answers)} prompts gave equal answers")
    lost = [result for result in results if result.comparison.verdict is Verdict.NOT_RESTORED]
    if arguments.against and lost and not any(result.sources for result in lost):
        print("if nothing outlives the server: add a child with a disk tier")
    if all(result.comparison.verdict is Verdict.LEFT for result in results):
        print('nothing was restored: give every child "load_weight": 1.0 for the verification')
    if arguments.save:
        print(f"saved: restart the server, then give --against {shown(str(arguments.save))} in place of --save")
    elif not arguments.against:
        print("not looked at: what a restart finds (--save FILE, restart the server, --against FILE)")


def _answer(result: Result) -> str:
    comparison = result.comparison
    apart = f" ({comparison.difference:.4f} apart)" if comparison.difference else ""
    return f"{comparison.verdict}{apart}{f': {comparison.detail}' if comparison.detail else ''}"


def _verdict(results: Sequence[Result], tolerance: float) -> str:
    verdicts = [result.comparison.verdict for result in results]
    summary = ", ".join(f"{count} {verdict}" for verdict in Verdict if (count := verdicts.count(verdict)))
    word = "passed" if is_passed(verdicts) else "FAILED"
    return f"{word}: {len(results)} answers: {summary} (tolerance {tolerance})"


VERIFY = Command(
    name="verify",
    summary="prove that what a server restores equals what it computes",
    description="Proves on your own model and settings that restored answers equal computed ones.",
    examples={"verify http://127.0.0.1:8000": "whether what a running server restores equals what it computes"},
    statuses={
        SOUND: "all restored and equal, or not worth a load",
        PROBLEMS: "an answer was not restored, or differs",
    },
    add_arguments=_add_arguments,
    run=_run,
)
