# SPDX-License-Identifier: Apache-2.0
"""What both dashboards share: their variables, their rows, their links to each other."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from devtools.dashboards.panels import DATASOURCE, Panel

TAG = "vllm-overlay"
_SERVED = "vllm:num_requests_running"
"""Every vLLM server has it, whatever its connectors."""
_CONNECTORS = '{__name__=~"vllm:kv_connector_state|vllm:hybrid_offload_objects"'


def framed(uid: str, title: str, description: str, rows: Mapping[str, Sequence[Panel]]) -> dashboard.Dashboard:
    """A dashboard. ``rows``: title -> panels, which fill the grid from left to right."""
    board = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG, "vllm"])
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Other dashboards of vllm-overlay")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .include_vars(True)
        )
    )
    for variable in _variables():
        board.with_variable(variable)
    for row, panels in rows.items():
        board.with_row(dashboard.Row(row))
        for panel in panels:
            board.with_panel(panel.build())
    return board


def _variables() -> tuple[dashboard.DatasourceVariable | dashboard.QueryVariable, ...]:
    """Each but the first offers what the ones before it leave."""
    model = 'model_name=~"$model"'
    server = f'{model}, instance=~"$server"'
    engine = f'{server}, engine=~"$engine"'
    return (
        dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"),
        _choice("model", "model", f"label_values({_SERVED}, model_name)"),
        _choice("server", "server", f"label_values({_SERVED}{{{model}}}, instance)"),
        _choice("engine", "engine", f"label_values({_SERVED}{{{server}}}, engine)"),
        _choice("connector", "connector", f"label_values({_CONNECTORS}, {engine}}}, connector)"),
    )


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": f"{name}-values"})
        .definition(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )
