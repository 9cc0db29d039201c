# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay probe``: asks a running server what its connectors and tiers do."""

import argparse
import json
import sys
import time

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import shown
from vllm_overlay.cli.probe_view import is_sound, names, tables
from vllm_overlay.cli.table import show_table
from vllm_overlay.config import ConfigError
from vllm_overlay.server.api_client import ApiClient, ApiError, Metrics
from vllm_overlay.server.interval import Interval

_CLEARED = "\x1b[2J\x1b[H"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
Reads /metrics alone, which every vLLM server has, and changes nothing. Without --watch all figures are since the
server's start. With it each table is of the last interval. VLLM_API_KEY is used if it is set. docs/metrics.md says what
each figure means.

examples:
  vllm-overlay probe http://127.0.0.1:8000
  vllm-overlay probe http://127.0.0.1:8000 --watch 10
"""
    parser.add_argument("url", metavar="URL", help="of a running server")
    parser.add_argument(
        "--watch",
        type=_interval,
        nargs="?",
        const=5.0,
        metavar="SECONDS",
        help="look again each so many seconds, until Ctrl-C (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="one object on standard output for each look")


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is no interval: give seconds from 0.1, such as 5")
    return value


def _run(arguments: argparse.Namespace) -> int:
    try:
        api = ApiClient(arguments.url)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    interval = Interval(None, _look(api, arguments.url))
    if not names(interval):
        raise ConfigError(
            f"the server at {arguments.url} has no connector of ours: start it with a --kv-transfer-config that names "
            "a MultiConnector or a HybridOffloadConnector"
        )
    _show(interval, arguments)
    if arguments.watch is None:
        return SOUND if is_sound(interval) else PROBLEMS
    return _watch(api, interval, arguments)


def _watch(api: ApiClient, interval: Interval, arguments: argparse.Namespace) -> int:
    """Until Ctrl-C, which is how it ends. A server that does not answer is waited for."""
    try:
        while True:
            time.sleep(arguments.watch)
            try:
                interval = Interval(interval.after, _look(api, arguments.url))
            except ConfigError as error:
                print(f"vllm-overlay: {shown(str(error))}; waiting", file=sys.stderr)
                continue
            _show(interval, arguments)
    except KeyboardInterrupt:
        return SOUND if is_sound(interval) else PROBLEMS


def _look(api: ApiClient, url: str) -> Metrics:
    try:
        return api.metrics()
    except (ApiError, OSError, ValueError) as error:
        raise ConfigError(f"no server answers at {url} with metrics: {error}") from error


def _show(interval: Interval, arguments: argparse.Namespace) -> None:
    found = tables(interval)
    if arguments.json:
        looked = {title: [dict(zip(rows[0], row, strict=True)) for row in rows[1:]] for title, rows in found.items()}
        print(json.dumps({"is_sound": is_sound(interval), **looked}), flush=True)
        return
    if arguments.watch is not None and sys.stdout.isatty():
        print(_CLEARED, end="")
    print("since the server's start" if interval.before is None else f"in the last {arguments.watch:g} s")
    for title, rows in found.items():
        print()
        show_table(title, rows, has_header=True)
    sys.stdout.flush()


PROBE = Command(
    name="probe",
    summary="what a running server's connectors and tiers do",
    description="Prints tiers, hit rates, lost tokens and faults of a running server.",
    examples={"probe http://127.0.0.1:8000 --watch": "hit rates, lost tokens and faults, every 5 s"},
    statuses={SOUND: "all in service", PROBLEMS: "a connector is out of service, or a tier has paused its loads"},
    add_arguments=_add_arguments,
    run=_run,
)
