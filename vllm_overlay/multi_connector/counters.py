# SPDX-License-Identifier: Apache-2.0
"""What a MultiConnector counts about one child, between two reports, in one process."""

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from functools import partial
from typing import Any

from vllm_overlay.common.buckets import Buckets
from vllm_overlay.common.reasons import Reason
from vllm_overlay.metrics import MULTI_CONNECTOR_BY_HOOK, MULTI_CONNECTOR_BY_REASON, MULTI_CONNECTOR_HISTOGRAMS

_BOUNDS = {name.field: name.buckets for name in MULTI_CONNECTOR_HISTOGRAMS}
_TABLES = tuple(name.field for name in (*MULTI_CONNECTOR_BY_HOOK, *MULTI_CONNECTOR_BY_REASON))


@dataclass(slots=True)
class Counters:
    """Increments since the last report; named as metrics.py's fields. They add up over processes and reports."""

    queries: int = 0
    asked_tokens: int = 0
    offered_tokens: int = 0
    chosen: int = 0
    trials: int = 0
    outbid: int = 0
    outbid_tokens: int = 0
    too_slow: int = 0
    too_slow_tokens: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    lookup_wait_seconds: float = 0.0
    invalid_answers: int = 0
    ignored_reports: int = 0
    isolations: int = 0
    returns: int = 0
    hangs: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """Exceptions by hook."""
    hook_seconds: dict[str, float] = field(default_factory=dict)
    ignored_offers: dict[str, int] = field(default_factory=dict)
    """Requests by reason."""
    ignored_offer_tokens: dict[str, int] = field(default_factory=dict)
    lookup_seconds: Buckets = field(default_factory=partial(Buckets, _BOUNDS["lookup_seconds"]))
    load_seconds: Buckets = field(default_factory=partial(Buckets, _BOUNDS["load_seconds"]))
    gauges: dict[str, float] = field(default_factory=dict)
    """The scheduler's latest values, where they have changed."""

    def count_error(self, hook: str) -> None:
        self.errors[hook] = self.errors.get(hook, 0) + 1

    def count_ignored_offer(self, reason: Reason, tokens: int) -> None:
        self.ignored_offers[reason] = self.ignored_offers.get(reason, 0) + 1
        self.ignored_offer_tokens[reason] = self.ignored_offer_tokens.get(reason, 0) + tokens

    def add(self, other: "Counters") -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _TABLES:
            table = getattr(self, name)
            for key, amount in getattr(other, name).items():
                table[key] = table.get(key, 0) + amount
        for name in _BOUNDS:
            getattr(self, name).add(getattr(other, name))
        self.gauges.update(other.gauges)

    def is_empty(self) -> bool:
        return self == _NOTHING

    def to_dict(self) -> dict[str, Any]:
        """Only what is not zero."""
        written: dict[str, Any] = {name: value for name in _NUMBERS if (value := getattr(self, name))}
        written |= {name: dict(table) for name in (*_TABLES, "gauges") if (table := getattr(self, name))}
        written |= {name: cells for name in _BOUNDS if (cells := getattr(self, name).to_list())}
        return written

    @classmethod
    def from_dict(cls, data: object) -> "Counters":
        counters = cls()
        if isinstance(data, Mapping):
            for name in _NUMBERS:
                if _is_amount(value := data.get(name, 0)):
                    setattr(counters, name, value)
            for name in (*_TABLES, "gauges"):
                setattr(counters, name, _amounts(data.get(name)))
            for name, bounds in _BOUNDS.items():
                setattr(counters, name, Buckets.from_list(bounds, data.get(name)))
        return counters


_NOTHING = Counters()
_NUMBERS = tuple(one.name for one in dataclasses.fields(Counters) if one.default is not MISSING)


def _amounts(table: object) -> dict[str, Any]:
    return {str(k): v for k, v in table.items() if _is_amount(v)} if isinstance(table, Mapping) else {}


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
