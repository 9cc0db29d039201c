# SPDX-License-Identifier: Apache-2.0
"""Queries to Prometheus over its HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/)."""

import re
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 240.0


class QueryError(RuntimeError):
    """Prometheus refused a query; the message has its reason."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels, and its samples as (seconds since 1970, value)."""

    labels: dict[str, str]
    samples: list[tuple[float, float]]

    def named(self, legend: str) -> str:
        """Grafana's legend, with labels in double braces; one that the series does not have is empty."""
        return re.sub(r"{{(\w+)}}", lambda found: self.labels.get(found[1], ""), legend)


@dataclass(frozen=True, slots=True)
class PrometheusApi:
    """``url`` is Prometheus' own, such as http://127.0.0.1:9090. Every method raises QueryError."""

    url: str

    def query(self, expression: str, at: float) -> list[Series]:
        """The value of an expression at one time."""
        found = self._get("query", {"query": expression, "time": at})
        if found["resultType"] == "scalar":
            return [Series({}, [_sample(found["result"])])]
        return [Series(one["metric"], [_sample(one["value"])]) for one in found["result"]]

    def query_range(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        """An expression's values from ``start`` to ``end``."""
        found = self._get("query_range", {"query": expression, "start": start, "end": end, "step": step_s})
        return [Series(one["metric"], [_sample(pair) for pair in one["values"]]) for one in found["result"]]

    def label_values(self, label: str, selector: str) -> list[str]:
        """What Grafana's ``label_values(selector, label)`` offers."""
        found: list[str] = self._get(f"label/{label}/values", {"match[]": selector})
        return found

    def _get(self, path: str, parameters: dict[str, Any]) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=TIMEOUT_S, trust_env=False)
        if answer.is_error:
            raise QueryError(f"{answer.text} of {parameters}")
        return answer.json()["data"]


def _sample(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])
