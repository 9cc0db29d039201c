# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay probe``: asks a running server what its connectors and tiers do."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable

from vllm_overlay.cli.causes import MULTI, TIER, cause, tiers_without_room
from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import Rows, show_table, shown, size
from vllm_overlay.config import ConfigError
from vllm_overlay.metrics import CONNECTOR, GROUP_KIND, HOOK, REASON, SOURCE
from vllm_overlay.server.api_client import ApiClient, ApiError
from vllm_overlay.server.interval import Interval

_PHASES = ("serving", "stopping", "out of service", "coming back")
"""By the value of the gauge ``state``."""
_SERVING = 0
_CLEARED = "\x1b[2J\x1b[H"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
Reads /metrics alone, which every vLLM server has, and changes nothing. Without --watch all figures are since the
server's start. With it each table is of the last interval. Of several engines of a server, what a tier holds is that
of the one with most: they may share a root. Where nothing was restored, the last line has the likeliest cause.
VLLM_API_KEY is used if it is set. docs/metrics.md says what each figure means.

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
    with contextlib.suppress(ValueError):
        if 0.1 <= (value := float(text)) <= 86400:
            return value
    raise argparse.ArgumentTypeError(
        f"{text!r} is no interval: give seconds from 0.1, such as --watch 5, after the URL"
    )


def _run(arguments: argparse.Namespace) -> int:
    api = ApiClient(arguments.url)
    interval = Interval(None, api.metrics())
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
                interval = Interval(interval.after, api.metrics())
            except ApiError as error:
                print(f"vllm-overlay: {shown(str(error))}; waiting", file=sys.stderr)
                continue
            _show(interval, arguments)
    except KeyboardInterrupt:
        return SOUND if is_sound(interval) else PROBLEMS


def _show(interval: Interval, arguments: argparse.Namespace) -> None:
    found = tables(interval)
    if arguments.json:
        looked = {title: [dict(zip(rows[0], row, strict=True)) for row in rows[1:]] for title, rows in found.items()}
        print(json.dumps({"is_sound": is_sound(interval), "cause": cause(interval), **looked}), flush=True)
        return
    if arguments.watch is not None and sys.stdout.isatty():
        print(_CLEARED, end="")
    print("since the server's start" if interval.before is None else f"in the last {arguments.watch:g} s")
    for title, rows in found.items():
        print()
        show_table(title, rows, has_header=True)
    if why := cause(interval):
        print(f"\nnothing was restored: {shown(why)}")
    sys.stdout.flush()


def tables(interval: Interval) -> dict[str, Rows]:
    """Title -> rows, of which the first names the columns. Tables without rows are left out."""
    found = {
        "connectors": _connectors(interval),
        "tiers": _tiers(interval),
        "tokens that were not restored, by reason": _lost(interval),
        "time to first token, by where most of the prompt came from": _first_tokens(interval),
        "faults": _faults(interval),
    }
    return {title: rows for title, rows in found.items() if len(rows) > 1}


def is_sound(interval: Interval) -> bool:
    """Whether every connector is in service, no tier has paused its loads, and each has room to store."""
    if interval.worst(f"{MULTI}_state") != _SERVING or interval.worst(f"{TIER}_loads_paused"):
        return False
    return not tiers_without_room(interval)


def names(interval: Interval) -> list[str]:
    """Every connector that the server has, ours and others'. Gauges come with the first step, counters before."""
    metrics = (f"{MULTI}_state", f"{TIER}_objects", f"{TIER}_stored_objects_total")
    return list(dict.fromkeys(name for metric in metrics for name in interval.connectors(metric)))


def _connectors(interval: Interval) -> Rows:
    columns = ("connector", "state", "weight", "hit", "loaded", "chosen", "outbid", "too slow", "a load", "a lookup")
    rows = [columns]
    for name in interval.connectors(f"{MULTI}_state"):
        amount = _amount_of(interval, MULTI, name)
        of = {CONNECTOR: name}
        weight = interval.worst_known(f"{MULTI}_load_weight", **of)
        rows.append(
            (
                shown(name),
                _PHASES[int(interval.worst(f"{MULTI}_state", **of))],
                "-" if weight is None else f"{weight:.2f}",  # None: it has offered nothing yet
                _share(amount("offered_tokens"), amount("asked_tokens")),
                f"{amount('loaded_tokens'):,.0f} tokens",
                f"{amount('chosen'):,.0f}",
                f"{amount('outbid'):,.0f}",
                f"{amount('too_slow'):,.0f}",
                _seconds(interval.mean(f"{MULTI}_load_seconds", **of)),
                _seconds(interval.mean(f"{MULTI}_lookup_seconds", **of)),
            )
        )
    return rows


def _tiers(interval: Interval) -> Rows:
    rows = [("tier", "used", "capacity", "full", "objects", "restored", "stored", "evicted", "pending")]
    for name in interval.connectors(f"{TIER}_objects"):
        amount = _amount_of(interval, TIER, name)
        of = {CONNECTOR: name}
        used, capacity, objects = (
            interval.worst(f"{TIER}_{gauge}", **of) for gauge in ("used_bytes", "capacity_bytes", "objects")
        )
        pending = sum(interval.now(f"{TIER}_pending_{what}", **of) for what in ("stores", "loads"))
        rows.append(
            (
                shown(name),
                size(int(used)),
                size(int(capacity)),
                _share(used, capacity),
                f"{objects:,.0f}",
                _share(amount("restored_tokens"), amount("queried_tokens")),
                size(int(amount("stored_bytes"))),
                f"{amount('evicted_objects'):,.0f}",
                f"{pending:,.0f}",
            )
        )
    return rows


def _lost(interval: Interval) -> Rows:
    tiers = interval.connectors(f"{TIER}_objects")
    name = f"{TIER}_lost_tokens_total"
    reasons = list(interval.by_label(name, REASON))
    rows = [("reason", *map(shown, tiers))]
    for reason in reasons:
        for kind in interval.by_label(name, GROUP_KIND, **{REASON: reason}):
            lost = [interval.amount(name, **{REASON: reason, GROUP_KIND: kind, CONNECTOR: tier}) for tier in tiers]
            rows.append((f"{reason} ({kind})" if kind else reason, *(f"{tokens:,.0f}" for tokens in lost)))
    return rows


def _first_tokens(interval: Interval) -> Rows:
    tiers = interval.connectors(f"{TIER}_objects")
    name = f"{TIER}_first_token_seconds"
    rows = [("source", *(shown(tier) for tier in tiers))]
    for source, _ in interval.by_label(f"{name}_count", SOURCE).items():
        cells = []
        for tier in tiers:
            of = {SOURCE: source, CONNECTOR: tier}
            mean = _seconds(interval.mean(name, **of))
            cells.append(f"{mean} of {interval.amount(f'{name}_count', **of):,.0f}" if mean != "-" else "-")
        rows.append((source, *cells))
    return rows


def _faults(interval: Interval) -> Rows:
    rows = [("connector", "what", "why", "times")]
    for metric, what, why in (
        (f"{TIER}_failed_loads_total", "load failed", REASON),
        (f"{TIER}_dropped_stores_total", "store dropped", REASON),
        (f"{TIER}_hook_errors_total", "unexpected error", REASON),
        (f"{MULTI}_errors_total", "exception", HOOK),
        (f"{MULTI}_failed_loads_total", "load failed", ""),
        (f"{MULTI}_isolations_total", "taken out of service", ""),
        (f"{MULTI}_hangs_total", "hook hung", ""),
    ):
        for name in interval.connectors(metric):
            causes = interval.by_label(metric, why, **{CONNECTOR: name}) if why else {}
            if not why and (times := interval.amount(metric, **{CONNECTOR: name})):
                causes = {"": times}
            rows += [(shown(name), what, shown(cause), f"{times:,.0f}") for cause, times in causes.items()]
    return rows


def _amount_of(interval: Interval, prefix: str, name: str) -> Callable[[str], float]:
    """Counters of one connector, by their field."""
    return lambda field: interval.amount(f"{prefix}_{field}_total", **{CONNECTOR: name})


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


PROBE = Command(
    name="probe",
    summary="what a running server's connectors and tiers do",
    description="Prints tiers, hit rates, lost tokens and faults of a running server.",
    examples={"probe http://127.0.0.1:8000 --watch": "hit rates, lost tokens and faults, every 5 s"},
    statuses={SOUND: "all in service", PROBLEMS: "a connector is out of service, or a tier cannot load or store"},
    add_arguments=_add_arguments,
    run=_run,
)
