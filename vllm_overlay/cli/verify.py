# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay verify``: on one's own model and settings, what is restored equals what is computed."""

import argparse
import contextlib
import http.client
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import size
from vllm_overlay.config import ConfigError
from vllm_overlay.server.api_client import ApiClient, ApiError
from vllm_overlay.server.server_process import ServerError, ServerProcess
from vllm_overlay.verification.comparison import PASSED, Verdict
from vllm_overlay.verification.load_weights import with_fixed_load_weights
from vllm_overlay.verification.verification import NothingToVerify, Result, Verification

_EMPTIED, _RESTARTED = "device cache emptied", "server restarted"
_START_TIMEOUT_S = 1800.0
"""A large model takes long to load."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "vllm-overlay verify [options] URL | vllm-overlay verify [options] -- SERVER-ARGUMENT ..."
    parser.epilog = """\
Sends prompts that end a few tokens past a restore point, of lengths around a match unit, a chunk and a block. Each is
computed twice and hit in vLLM's device cache. Then it is restored with that cache emptied. With server arguments it is
restored once more after a restart. Tokens and logprobs must be those that were computed, or those of vLLM's own hit, to
the last bit. Else they must be within --tolerance, and where a token differs both must have been that nearly likely.

A running server must have VLLM_SERVER_DEV_MODE=1 and --enable-prompt-tokens-details. It should serve nobody else
meanwhile. VLLM_API_KEY is used if it is set. Where load_weight is "auto", what is faster to compute is not restored. So
give all children numbers for the verification. A server that is started here gets load_weight 1.0 by itself. What is
stored stays in the tiers, and no other request finds it.

examples:
  vllm-overlay verify http://127.0.0.1:8000
  vllm-overlay verify -- --model MODEL --prefix-match-unit 64 --kv-transfer-config "$(cat config.json)"
"""
    parser.add_argument(
        "server", nargs="+", metavar="URL", help="a running server, or, after --, the arguments of one to start"
    )
    parser.add_argument("--model", default="", help="name in requests (default: the first that the server serves)")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.05,
        metavar="LOGPROB",
        help="0: equal bits (default: %(default)s)",
    )
    parser.add_argument(
        "--longest", type=int, default=8192, metavar="TOKENS", help="of a prompt (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' tokens (default: %(default)s)")
    parser.add_argument("--no-restart", action="store_true", help="do not start the server a second time")
    parser.add_argument("--log", metavar="FILE", help="of the servers that it starts (default: a temporary file)")
    parser.add_argument("--json", action="store_true", help="one object on standard output")


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text} is not a difference of logprobs: give a number from 0, such as 0.05")
    return value


def _run(arguments: argparse.Namespace) -> int:
    verification = Verification(arguments.tolerance, arguments.longest, arguments.seed, _say())
    is_url = len(arguments.server) == 1 and not arguments.server[0].startswith("-")
    try:
        if is_url:
            _verify(verification, _client(arguments.server[0], arguments.model))
        else:
            with _terminated_as_interrupted():
                _verify_own(verification, arguments)
    except (NothingToVerify, ApiError, http.client.HTTPException) as error:
        raise ConfigError(str(error)) from error
    except ServerError as error:
        raise ConfigError(f"{str(error).splitlines()[0]} Its log: {arguments.log}") from error
    is_sound = all(result.comparison.verdict in PASSED for result in verification.results)
    if arguments.json:
        print(json.dumps([_plain(result) for result in verification.results], indent=2))
    else:
        _print(verification, arguments.tolerance, was_restarted=not (is_url or arguments.no_restart))
    return SOUND if is_sound else PROBLEMS


def _client(url: str, model: str) -> ApiClient:
    try:
        api = ApiClient(url, model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not api.is_healthy():
        raise ConfigError(f"no server answers at {url}: start it, or give its arguments after --")
    return api


def _verify(verification: Verification, api: ApiClient) -> None:
    verification.compute(api)
    verification.restore(api, _EMPTIED)


def _verify_own(verification: Verification, arguments: argparse.Namespace) -> None:
    """Starts the server, and a second one after it."""
    if arguments.log is None:
        descriptor, arguments.log = tempfile.mkstemp(prefix="vllm-overlay-verify-", suffix=".log")
        os.close(descriptor)
    say = _say()
    server_arguments = with_fixed_load_weights(arguments.server)
    if server_arguments != arguments.server:
        say('every load_weight "auto" is 1.0 here, so that what is found is restored, however long that takes')

    def server() -> ServerProcess:
        say(f"start the server (log: {arguments.log})")
        return ServerProcess(
            server_arguments, log_path=Path(arguments.log), model=arguments.model, start_timeout_s=_START_TIMEOUT_S
        )

    with server() as api:
        _verify(verification, api)
        say("stop the server")
    if not arguments.no_restart:
        with server() as api:
            verification.restore(api, _RESTARTED)
            say("stop the server")


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Meanwhile SIGTERM ends servers as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say() -> Callable[[str], None]:
    """Lines of progress on standard error: over one another on a terminal, else one after the other."""
    begin, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
    return lambda text: print(f"{begin}{text} ...", end=end, file=sys.stderr, flush=True)


def _plain(result: Result) -> dict[str, object]:
    return {
        "prompt": result.prompt.name,
        "restored_after": result.life,
        "restored_tokens": result.num_restored,
        "expected_tokens": result.prompt.boundary,
        "loaded_bytes": result.sources,
        "verdict": result.comparison.verdict,
        "difference": result.comparison.difference,
        "detail": result.comparison.detail,
    }


def _print(verification: Verification, tolerance: float, was_restarted: bool) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    rows = [("prompt", "restored after", "tokens", "loaded", "answer")]
    for result in verification.results:
        loaded = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in result.sources.items())
        rows.append((result.prompt.name, result.life, str(result.num_restored), loaded or "nothing", _answer(result)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for line in _verdict(verification.results, tolerance):
        print(line)
    if not was_restarted:
        print("not looked at: what a restart finds (give the server's arguments after --, without --no-restart)")
    print(
        f"computed twice, {verification.num_equal_recomputed} of {verification.num_prompts} prompts gave equal answers"
    )


def _answer(result: Result) -> str:
    comparison = result.comparison
    apart = f" ({comparison.difference:.4f} apart)" if comparison.difference else ""
    return f"{comparison.verdict}{apart}{f': {comparison.detail}' if comparison.detail else ''}"


def _verdict(results: Sequence[Result], tolerance: float) -> list[str]:
    failed = [result for result in results if result.comparison.verdict not in PASSED]
    counts = {verdict: sum(result.comparison.verdict is verdict for result in results) for verdict in Verdict}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    lines = [f"{'FAILED' if failed else 'passed'}: {len(results)} restored answers: {summary} (tolerance {tolerance})"]
    lost = [result for result in failed if result.comparison.verdict is Verdict.NOT_RESTORED]
    if any(result.sources for result in lost):
        lines.append(
            "bytes were loaded, but no cached tokens reported: start the server with --enable-prompt-tokens-details"
        )
    elif {result.life for result in lost} == {_RESTARTED}:
        lines.append("nothing outlives the server: add a child with a disk tier, or pass --no-restart")
    return lines


VERIFY = Command(
    name="verify",
    summary="prove that what a server restores equals what it computes",
    description="Proves on your own model and settings that restored answers equal computed ones.",
    examples={"verify http://127.0.0.1:8000": "whether what a running server restores equals what it computes"},
    statuses={SOUND: "all restored and equal", PROBLEMS: "an answer was not restored, or differs"},
    add_arguments=_add_arguments,
    run=_run,
)
