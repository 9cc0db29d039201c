# SPDX-License-Identifier: Apache-2.0
"""A dashboard drawn with matplotlib from Prometheus' answers, where no Grafana is: its panels, its grid, its units.

It reads the committed JSON, so a picture shows the queries that Grafana would send. Colours and fonts are matplotlib's.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tests.dashboards.prometheus_api import PrometheusApi, Series

GRID_WIDTH = 24
INCHES_WIDE, INCHES_A_ROW = 18.0, 0.34
DPI = 80
_BACKGROUND, _GRID, _DIM = "#ffffff", "#e4e4e8", "#6b6b76"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Period:
    """What a picture shows. ``window_s`` stands for Grafana's ``$__rate_interval``."""

    start: float
    end: float
    step_s: float
    window_s: int


def draw(board: Mapping[str, Any], prometheus: PrometheusApi, period: Period, path: Path) -> None:
    """Write the dashboard's picture as PNG. Raises QueryError."""
    panels = board["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(INCHES_WIDE, (rows + 2) * INCHES_A_ROW), facecolor=_BACKGROUND)
    figure.text(0.01, 1 - 1 / (rows + 2), board["title"], fontsize=15, weight="bold", va="center")
    for panel in panels:
        _draw_panel(figure, panel, rows, prometheus, period)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _draw_panel(figure: Figure, panel: Mapping[str, Any], rows: int, prometheus: PrometheusApi, period: Period) -> None:
    place = panel["gridPos"]
    bottom = rows - place["y"] - place["h"]
    left, width = place["x"] / GRID_WIDTH, place["w"] / GRID_WIDTH
    base, height = bottom / (rows + 2), place["h"] / (rows + 2)
    if panel["type"] == "row":
        figure.text(0.01, base + height / 2, panel["title"], fontsize=11, color=_DIM, va="center")
        return
    inner = (
        left + 0.055 if place["w"] < GRID_WIDTH else left + 0.04,
        base + height * (0.1 if panel["type"] == "stat" else 0.3),
    )
    axes = figure.add_axes((*inner, width - 0.07, height * 0.55))
    axes.set_title(panel["title"], fontsize=10, loc="left", weight="bold")
    _KINDS[panel["type"]](axes, panel, prometheus, period)


def _draw_number(axes: Axes, panel: Mapping[str, Any], prometheus: PrometheusApi, period: Period) -> None:
    (target,) = panel["targets"]
    found = prometheus.query(_expression(target, period, int(period.end - period.start)), period.end)
    value = found[0].samples[0][1] if found else math.nan
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    (*_, color) = (step["color"] for step in steps if step["value"] is None or value >= step["value"])
    axes.axis("off")
    axes.text(0.5, 0.3, _unit(panel)(value, 0), fontsize=22, ha="center", va="center", color=color)


def _draw_lines(axes: Axes, panel: Mapping[str, Any], prometheus: PrometheusApi, period: Period) -> None:
    custom = panel["fieldConfig"]["defaults"]["custom"]
    has_bars = custom.get("drawStyle") == "bars"
    start, step_s = period.start, period.step_s
    if has_bars:  # neighbouring bars must not count the same event, and the last one ends with the period
        step_s = period.window_s
        start = period.end - int((period.end - period.start) // step_s) * step_s
    lines = [
        (series, series.named(target["legendFormat"]), _is_dashed(panel, target))
        for target in panel["targets"]
        for series in prometheus.query_range(_expression(target, period, period.window_s), start, period.end, step_s)
    ]
    if custom.get("stacking", {}).get("mode") == "normal":
        _stack(axes, [(series, name) for series, name, _ in lines], period)
    else:
        for place, (series, name, dashed) in enumerate(lines):
            drawn = [(when - period.start, value) for when, value in series.samples]
            style = "--" if dashed else "-"
            if has_bars:
                _bars(axes, drawn, name, place, period)
            else:
                axes.plot(*zip(*drawn, strict=True), style, linewidth=1.3, label=name)
    _finish(axes, panel, period)


def _stack(axes: Axes, lines: list[tuple[Series, str]], period: Period) -> None:
    """What is nothing all the time is left out."""
    lines = [(series, name) for series, name in lines if any(value > 0 for _, value in series.samples)]
    times = sorted({when for series, _ in lines for when, _ in series.samples})
    values = [[dict(series.samples).get(when, 0.0) for when in times] for series, _ in lines]
    if times:
        seconds = [when - period.start for when in times]
        axes.stackplot(seconds, *values, labels=[name for _, name in lines], alpha=0.65)


def _bars(axes: Axes, drawn: list[tuple[float, float]], name: str, place: int, period: Period) -> None:
    """Of what happened at all."""
    if any(value > 0 for _, value in drawn):
        times, values = zip(*drawn, strict=True)
        axes.bar(
            times, values, width=-0.9 * period.window_s, align="edge", label=name, color=f"C{place % 10}", alpha=0.7
        )


def _draw_states(axes: Axes, panel: Mapping[str, Any], prometheus: PrometheusApi, period: Period) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    colors = {float(value): named["color"] for value, named in mapping["options"].items()}
    names: list[str] = []
    for target in panel["targets"]:
        expression = _expression(target, period, period.window_s)
        for series in prometheus.query_range(expression, period.start, period.end, period.step_s):
            band = [(when - period.start, period.step_s) for when, _ in series.samples]
            axes.broken_barh(band, (len(names), 0.8), facecolors=[colors[value] for _, value in series.samples])
            names.append(series.named(target["legendFormat"]))
    axes.set_yticks([place + 0.4 for place in range(len(names))], names)
    _time_axis(axes, period)
    left, bottom, width, height = axes.get_position().bounds
    axes.set_position((left + 0.11, bottom, width - 0.11, height))


_KINDS: dict[str, Callable[[Axes, Mapping[str, Any], PrometheusApi, Period], None]] = {
    "stat": _draw_number,
    "timeseries": _draw_lines,
    "state-timeline": _draw_states,
}


def _finish(axes: Axes, panel: Mapping[str, Any], period: Period) -> None:
    _time_axis(axes, period)
    top = panel["fieldConfig"]["defaults"].get("max")
    axes.set_ylim(0, top if top is not None else max(axes.get_ylim()[1], 1e-9))
    axes.yaxis.set_major_formatter(FuncFormatter(_unit(panel)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if axes.get_legend_handles_labels()[0]:
        columns = _legend_columns(panel, axes)
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.02, -0.14), ncols=columns, fontsize=7, frameon=False, borderpad=0
        )


def _legend_columns(panel: Mapping[str, Any], axes: Axes) -> int:
    """As many as fit: a character of the legend takes about a hundredth of half a dashboard."""
    longest = max(len(name) for name in axes.get_legend_handles_labels()[1]) + 8
    width: int = panel["gridPos"]["w"]
    return max(1, 260 * width // GRID_WIDTH // longest)


def _time_axis(axes: Axes, period: Period) -> None:
    """Minutes and seconds from the period's start."""
    axes.set_xlim(0, period.end - period.start)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{int(seconds) // 60}:{int(seconds) % 60:02d}"))
    axes.grid(color=_GRID)
    axes.tick_params(labelsize=8, colors=_DIM)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _expression(target: Mapping[str, Any], period: Period, window_s: int) -> str:
    """The query with everything chosen. ``window_s`` stands for ``$__range`` too, in panels with one number."""
    windows = {"__rate_interval": f"{period.window_s}s", "__range": f"{window_s}s"}
    return re.sub(r"\$(\w+)", lambda found: windows.get(found[1], ".*"), target["expr"])


def _is_dashed(panel: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    return any(one["matcher"]["options"] == target["refId"] for one in panel["fieldConfig"].get("overrides", []))


def _unit(panel: Mapping[str, Any]) -> Callable[[float, Any], str]:
    return _UNITS[panel["fieldConfig"]["defaults"]["unit"]]


def _share(value: float, _: Any) -> str:
    return f"{value:.0%}"


def _seconds(value: float, _: Any) -> str:
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {name}"
    return f"{value / 1e-6:.3g} µs" if value else "0"


def _plain(value: float, _: Any) -> str:
    return f"{value / 1000:.3g} K" if abs(value) >= 1000 else f"{value:.3g}"


def _bytes(value: float, _: Any) -> str:
    place = min(int(math.log(value, 1024)), len(_BYTES) - 1) if value >= 1 else 0
    return f"{value / 1024**place:.3g} {_BYTES[place]}"


_UNITS: dict[str, Callable[[float, Any], str]] = {
    "percentunit": _share,
    "s": _seconds,
    "short": _plain,
    "ops": lambda value, _: f"{_plain(value, _)}/s",
    "bytes": _bytes,
    "Bps": lambda value, _: f"{_bytes(value, _)}/s",
}
