# SPDX-License-Identifier: Apache-2.0
"""The committed dashboards as Grafana would read them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[2] / "dashboards"
NAMES = ("overview", "internals")


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel."""

    board: str
    panel: str
    ref_id: str
    expression: str
    legend: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}, {self.ref_id}"

    def in_window(self, seconds: int, choices: Mapping[str, str] | None = None) -> str:
        """As Grafana would send it: the variables chosen (all of them, unless ``choices`` says), the window so long."""
        values = {"model": ".*", "server": ".*", "engine": ".*", "connector": ".*", **(choices or {})}
        windows = {"__rate_interval": f"{seconds}s", "__range": f"{seconds}s"}
        return re.sub(r"\$(\w+)", lambda found: (values | windows)[found[1]], self.expression)


def read(name: str) -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return board


def panels(name: str) -> list[dict[str, Any]]:
    """Those that draw something."""
    return [panel for panel in read(name)["panels"] if panel["type"] != "row"]


def targets() -> list[Target]:
    """Every query of every panel."""
    return [
        Target(name, panel["title"], one["refId"], one["expr"], one["legendFormat"])
        for name in NAMES
        for panel in panels(name)
        for one in panel["targets"]
    ]


def target(panel: str, ref_id: str = "A") -> Target:
    (found,) = (one for one in targets() if (one.panel, one.ref_id) == (panel, ref_id))
    return found
