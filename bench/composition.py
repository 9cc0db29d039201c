# SPDX-License-Identifier: Apache-2.0
"""Whether a restore that takes objects from several tiers pays: ``python -m bench.composition TRACE``.

Replays a request trace through two children of one MultiConnector, a CPU and a disk tier. The planner, the index, the
order of eviction and the admission are those that serve. One replay restores each request from the child with the most
tokens, as today. Another one composes: it takes each object from the first child that has it. There is no model, no
bytes and no device cache.

The trace is one of Mooncake's FAST'25 release, say conversation_trace.jsonl (repository kvcache-ai/Mooncake, folder
FAST25-release/traces). W is the size of all its distinct attention; the CPU tier gets a part of W, the disk tier four
times that if the setting does not say otherwise.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.composition_settings import SETTINGS, Setting, build
from bench.measure import table
from bench.replay import MODELS, PREFILL_TOKENS_PER_S, Load, Served
from bench.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace
from vllm_overlay.planner.geometry import Geometry

CPU_GB_PER_S = 25
DISK_GB_PER_S = (1, 3)
THRESHOLD = 0.02
"""Of the restored tokens: a smaller gain is not worth the machinery."""


class Times(msgspec.Struct, frozen=True):
    """Milliseconds, means over requests, each from the tiers as the replay without composition leaves them.

    The time to the first token is the load and then the prefill of the rest. With ``by_tokens`` the child with the most
    tokens loads. With ``by_time`` the child that is done first loads, or none. Times of loads are of those requests
    that restore something.
    """

    disk_gb_per_s: int
    load_by_tokens: float
    load_composed: float
    first_token_by_tokens: float
    first_token_by_time: float
    first_token_composed: float


class Row(msgspec.Struct, frozen=True):
    """One setting with one size of the CPU tier. Shares are of all prompt tokens."""

    setting: str
    cpu_share: str
    single: float
    composed: float
    requests_gained: int
    requests_lost: int
    at_once: float
    """What composing would have restored from the tiers as the other replay left them."""
    shipped: float
    """One child alone, with the tiers as they ship."""
    times: list[Times]

    @property
    def gain(self) -> float:
        return gain(self.composed, self.single)

    @property
    def gain_over_shipped(self) -> float:
        return gain(self.composed, self.shipped)


def gain(new: float, old: float) -> float:
    """How much more, as a share: 0.02 for 2 %. Nothing from nothing gives 0."""
    return new / old - 1 if old else float(new > 0)


def distinct_bytes(requests: Sequence[TraceRequest], geometry: Geometry) -> int:
    """W: the attention of all distinct blocks."""
    num_blocks = len({block for request in requests for block in request.block_ids})
    return int(num_blocks * BLOCK_TOKENS * geometry.token_bytes)


def restored_share(served: Sequence[Served]) -> float:
    return sum(one.load.tokens for one in served) / sum(one.num_tokens for one in served)


def times(served: Sequence[Served], disk_gb_per_s: int) -> Times:
    """Of a replay without composition."""
    speeds = CPU_GB_PER_S * 1e9, disk_gb_per_s * 1e9
    hits = [one for one in served if one.load.tokens]
    composed = [next(load for load in one.composed if load.tokens == one.load.tokens) for one in hits]

    def first_token(one: Served, load: Load) -> float:
        return load.seconds(*speeds) + (one.num_tokens - load.tokens) / PREFILL_TOKENS_PER_S

    def best(one: Served, loads: Sequence[Load]) -> float:
        return min(first_token(one, load) for load in (*loads, Load()))

    return Times(
        disk_gb_per_s,
        1e3 * fmean([one.load.seconds(*speeds) for one in hits] or [0.0]),
        1e3 * fmean([load.seconds(*speeds) for load in composed] or [0.0]),
        1e3 * fmean(first_token(one, one.load) for one in served),
        1e3 * fmean(best(one, one.alone) for one in served),
        1e3 * fmean(best(one, one.composed) for one in served),
    )


def measure(
    setting: Setting,
    geometry: Geometry,
    requests: Sequence[TraceRequest],
    divisor: int,
    shipped: float | None = None,
    step: Callable[[], None] = lambda: None,
) -> Row:
    """Both replays of one setting, the CPU tier with W / ``divisor``. ``step`` is called once a request and replay."""
    cpu_bytes = distinct_bytes(requests, geometry) // divisor

    def replayed(composes: bool) -> list[Served]:
        replay, restart = build(setting, geometry, cpu_bytes, len(requests), composes)

        def before(place: int) -> None:
            restart(place)
            step()

        return list(replay.run(requests, before))

    single, composed = replayed(False), replayed(True)
    pairs = [(one.load.tokens, other.load.tokens) for one, other in zip(single, composed, strict=True)]
    most = sum(max((load.tokens for load in one.composed), default=0) for one in single)
    return Row(
        setting.name,
        f"W/{divisor}",
        restored_share(single),
        restored_share(composed),
        sum(b > a for a, b in pairs),
        sum(b < a for a, b in pairs),
        most / sum(one.num_tokens for one in single),
        restored_share(single) if shipped is None else shipped,
        [times(single, speed) for speed in DISK_GB_PER_S],
    )


def measure_all(
    settings: Sequence[Setting],
    geometry: Geometry,
    requests: Sequence[TraceRequest],
    divisors: Sequence[int],
    step: Callable[[], None],
) -> Iterator[Row]:
    """A row for each setting and size, those of a size together. A row that another is compared to comes before it."""
    for divisor in divisors:
        shares: dict[str, float] = {}
        for setting in settings:
            row = measure(setting, geometry, requests, divisor, shares.get(setting.compared_to), step)
            shares[setting.name] = row.single
            yield row


def chosen(names: Sequence[str]) -> list[Setting]:
    """The settings with one of ``names`` in their names, and those they are compared to. Without names, all."""
    wanted = {s.name for s in SETTINGS if not names or any(name in s.name for name in names)}
    wanted |= {s.compared_to for s in SETTINGS if s.name in wanted}
    return [setting for setting in SETTINGS if setting.name in wanted]


TOKEN_COLUMNS = (
    "CPU",
    "setting",
    "one child",
    "composed",
    "gain",
    "requests gained",
    "lost",
    "gain at once",
    "over shipped",
)
TIME_COLUMNS = (
    "CPU",
    "setting",
    "disk",
    "load, one child",
    "composed",
    "first token, one child",
    "by time",
    "composed",
    "saved",
)


def token_row(row: Row) -> Sequence[object]:
    return (
        row.cpu_share,
        row.setting,
        f"{row.single:.4f}",
        f"{row.composed:.4f}",
        f"{row.gain:+.2%}",
        row.requests_gained,
        row.requests_lost,
        f"{gain(row.at_once, row.single):+.2%}",
        f"{row.gain_over_shipped:+.2%}",
    )


def time_row(row: Row, one: Times) -> Sequence[object]:
    return (
        row.cpu_share,
        row.setting,
        f"{one.disk_gb_per_s} GB/s",
        f"{one.load_by_tokens:.1f} ms",
        f"{one.load_composed:.1f} ms",
        f"{one.first_token_by_tokens:.1f} ms",
        f"{one.first_token_by_time:.1f} ms",
        f"{one.first_token_composed:.1f} ms",
        f"{one.first_token_by_time - one.first_token_composed:.2f} ms",
    )


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if that is a terminal: what to call once a request and replay."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.composition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="settings:\n" + "\n".join(f"  {setting.name}" for setting in SETTINGS),
    )
    made.add_argument("trace", type=Path, metavar="TRACE", help="the trace, a .jsonl file")
    made.add_argument(
        "--cpu", type=int, nargs="+", default=[32, 8], metavar="N", help="the CPU tier holds W/N (default: 32 8)"
    )
    made.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="TEXT",
        help="only settings with TEXT in their names, and those they are compared to; may be repeated",
    )
    made.add_argument(
        "--model",
        choices=MODELS,
        default="states",
        help="states: Qwen3.5-35B-A3B (default); windows: Gemma-3-4B, with sliding windows and no states",
    )
    made.add_argument("--requests", type=int, metavar="N", help="the first N requests (default: all; W is theirs)")
    made.add_argument("--json", action="store_true", help="print the figures as one JSON object instead of tables")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    arguments = made.parse_args(argv)
    settings, geometry = chosen(arguments.setting), MODELS[arguments.model]
    if not settings:
        made.error(f"no setting has {arguments.setting[0]!r} in its name: --help lists them")
    if min(arguments.cpu) < 1 or (arguments.requests is not None and arguments.requests < 1):
        made.error("--cpu and --requests take numbers from 1 on")
    try:
        requests = read_trace(arguments.trace)[: arguments.requests]
    except (OSError, TraceError) as error:
        made.error(str(error))
    with progress(2 * len(settings) * len(arguments.cpu) * len(requests)) as step:
        rows = list(measure_all(settings, geometry, requests, arguments.cpu, step))
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.encode({"num_requests": len(requests), "rows": rows}) + b"\n")
        return 0
    num_tokens = sum(request.num_tokens for request in requests)
    print(
        f"{len(requests)} requests, {num_tokens} prompt tokens, W = {distinct_bytes(requests, geometry) / 1e9:.0f} GB\n"
    )
    print(table(TOKEN_COLUMNS, map(token_row, rows)) + "\n")
    print(table(TIME_COLUMNS, (time_row(row, one) for row in rows for one in row.times)))
    above = [f"{row.setting} ({row.cpu_share})" for row in rows if row.gain >= THRESHOLD]
    print(f"\nComposing restores at least {THRESHOLD:.0%} more tokens: {'; '.join(above) or 'nowhere'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
