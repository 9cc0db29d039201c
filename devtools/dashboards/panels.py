# SPDX-License-Identifier: Apache-2.0
"""The kinds of panels that both dashboards are made of."""

from collections.abc import Mapping
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, YELLOW, RED = "green", "yellow", "red"
STAT_HEIGHT, HEIGHT = 4, 8
BAR_INTERVAL = "1m"
"""No bar is of less. A bar counts the last `$__rate_interval`, which is a little more: an event may be in two."""
FULL_WIDTH, HALF, QUARTER = 24, 12, 6
"""Grafana's grid is 24 wide."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and the name of its lines, with labels in double braces. ``dashed`` draws a limit."""

    expression: str
    legend: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel of lines over time.

    ``unit`` is one of Grafana's: percentunit, s, bytes, Bps, short, ops and so on. ``top``: the scale ends there.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False
    bars: bool = False
    top: float | None = None
    width: int = HALF

    def build(self) -> timeseries.Panel:
        """The SDK's builder."""
        panel = (
            timeseries.Panel()
            .title(self.title)
            .description(self.description)
            .datasource(DATASOURCE)
            .unit(self.unit)
            .span(self.width)
            .height(HEIGHT)
            .line_width(1)
            .fill_opacity(25 if self.stacked else 60 if self.bars else 0)
            .show_points(common_models.VisibilityMode.NEVER)
            .span_nulls(False)
            .min(0)
            .legend(_legend())
            .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        )
        if self.top is not None:
            panel.max(self.top)
        if self.bars:
            panel.draw_style(common_models.GraphDrawStyle.BARS).interval(BAR_INTERVAL)
        if self.stacked:
            panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
        for place, query in enumerate(self.queries):
            panel.with_target(_target(query, place))
            if query.dashed:
                panel.override_by_query(_ref_id(place), [_dashes()])
        return panel


@dataclass(frozen=True, slots=True)
class Number:
    """A panel with one number of the whole time range. ``thresholds``: from which value on it has which colour."""

    title: str
    description: str
    unit: str
    expression: str
    thresholds: Mapping[float, str]
    width: int = QUARTER

    def build(self) -> stat.Panel:
        """The SDK's builder."""
        steps = [models.Threshold(value=None, color=GREEN)]
        steps += [models.Threshold(value=value, color=color) for value, color in self.thresholds.items()]
        return (
            stat.Panel()
            .title(self.title)
            .description(self.description)
            .datasource(DATASOURCE)
            .unit(self.unit)
            .span(self.width)
            .height(STAT_HEIGHT)
            .color_mode(common_models.BigValueColorMode.VALUE)
            .graph_mode(common_models.BigValueGraphMode.NONE)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
            .with_target(_query(self.expression, "", 0).instant())
        )


@dataclass(frozen=True, slots=True)
class States:
    """A panel with one band a connector. ``names``: value -> what it is called, and its colour."""

    title: str
    description: str
    queries: tuple[Query, ...]
    names: Mapping[int, tuple[str, str]]
    width: int = FULL_WIDTH

    def build(self) -> statetimeline.Panel:
        """The SDK's builder."""
        mapped = {
            str(value): models.ValueMappingResult(text=text, color=color, index=value)
            for value, (text, color) in self.names.items()
        }
        panel = (
            statetimeline.Panel()
            .title(self.title)
            .description(self.description)
            .datasource(DATASOURCE)
            .span(self.width)
            .height(HEIGHT)
            .mappings([models.ValueMap(options=mapped)])
            .merge_values(True)
            .show_value(common_models.VisibilityMode.AUTO)
            .legend(_legend())
        )
        for place, query in enumerate(self.queries):
            panel.with_target(_target(query, place))
        return panel


Panel = Chart | Number | States


def _target(query: Query, place: int) -> prometheus.Dataquery:
    return _query(query.expression, query.legend, place).range()


def _query(expression: str, legend: str, place: int) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(DATASOURCE).expr(expression).legend_format(legend).ref_id(_ref_id(place))


def _ref_id(place: int) -> str:
    return "ABCDEFGHIJ"[place]


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )


def _dashes() -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 10]})
