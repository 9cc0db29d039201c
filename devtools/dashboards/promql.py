# SPDX-License-Identifier: Apache-2.0
"""PromQL as the panels need it: of the chosen models, servers, engines and connectors, over Grafana's own interval."""

from collections.abc import Sequence

OURS = ("vllm:hybrid_offload_", "vllm:kv_connector_")
"""Families with the label ``connector``."""
TIER, CHILD = OURS
WINDOW = "$__rate_interval"
"""Grafana's: long enough for four scrapes."""
WHOLE_RANGE = "$__range"
ENGINE = ("connector", "instance", "engine")
"""One connector of one engine of one server."""


def selected(metric: str, **labels: str) -> str:
    """Series of one metric that the dashboard's variables choose; a label's value is a regular expression."""
    matchers = {"model_name": "$model", "instance": "$server", "engine": "$engine"}
    if metric.startswith(OURS):
        matchers["connector"] = "$connector"
    chosen = ", ".join(f'{label}=~"{value}"' for label, value in (matchers | labels).items())
    return f"{metric}{{{chosen}}}"


def rate(counter: str, by: Sequence[str] = ("connector",), **labels: str) -> str:
    """A counter's growth a second; ``counter`` is its name without ``_total``."""
    return summed(f"rate({selected(f'{counter}_total', **labels)}[{WINDOW}])", by)


def increase(counter: str, by: Sequence[str] = ("connector",), window: str = WINDOW, **labels: str) -> str:
    """A counter's growth over the window."""
    return summed(f"increase({selected(f'{counter}_total', **labels)}[{window}])", by)


def summed(expression: str, by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def largest(gauge: str, by: Sequence[str] = ("connector",)) -> str:
    """A gauge's largest value among the series that ``by`` puts together."""
    return f"max by ({', '.join(by)}) ({selected(gauge)})"


def ratio(part: str, whole: str) -> str:
    """Nothing is drawn where ``whole`` is 0."""
    return f"{part} / {whole}"


def quantile(share: float, histogram: str, by: Sequence[str] = ("connector",), **labels: str) -> str:
    """Of a histogram's observations in the window."""
    buckets = f"rate({selected(f'{histogram}_bucket', **labels)}[{WINDOW}])"
    return f"histogram_quantile({share}, {summed(buckets, (*by, 'le'))})"


def total(histogram: str, by: Sequence[str] = ("connector",), **labels: str) -> str:
    """The growth a second of what a histogram has observed."""
    return summed(f"rate({selected(f'{histogram}_sum', **labels)}[{WINDOW}])", by)


def mean(histogram: str, by: Sequence[str] = ("connector",), **labels: str) -> str:
    """Of a histogram's observations in the window."""
    count = summed(f"rate({selected(f'{histogram}_count', **labels)}[{WINDOW}])", by)
    return ratio(total(histogram, by, **labels), count)


def average(expression: str) -> str:
    """Over connectors, without those that have nothing to divide: NaN, and nothing but NaN, is not at least 0."""
    return f"avg({expression} >= 0)"


def child_or_tier(child: str, tier: str, by: Sequence[str] = ("connector",), whole_range: bool = False) -> str:
    """A counter of each connector: the MultiConnector's of its children, a tier's own where no MultiConnector is.

    Children of ours export both, and are counted once.
    """
    function, window = ("increase", WHOLE_RANGE) if whole_range else ("rate", WINDOW)
    sides = (
        summed(f"{function}({selected(f'{counter}_total')}[{window}])", ENGINE)
        for counter in (f"{CHILD}{child}", f"{TIER}{tier}")
    )
    return summed(" or ".join(sides), by)
