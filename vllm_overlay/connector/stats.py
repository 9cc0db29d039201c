# SPDX-License-Identifier: Apache-2.0
"""What HybridOffloadConnector counts, in a form that vLLM can carry from any process to the metrics front end."""

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class OffloadStats(KVConnectorStats):
    """``data`` = {"name": configured name, "counters": {"metric" or "metric:reason": amount}, "gauges": {...}}.

    Counters add up over ranks and steps; of gauges, which only the scheduler side reports, the last one stays.
    """

    @classmethod
    def make(cls, name: str) -> "OffloadStats":
        return cls(data={"name": name, "counters": Counter(), "gauges": {}})

    def count(self, metric: str, amount: float = 1, reason: str = "") -> None:
        """Adds to one counter; ``reason`` becomes the label of that name."""
        self.data["counters"][f"{metric}:{reason}" if reason else metric] += amount

    def gauge(self, metric: str, value: float) -> None:
        self.data["gauges"][metric] = value

    def take(self) -> "OffloadStats | None":
        """What was counted since the last call, or None."""
        if self.is_empty():
            return None
        taken = OffloadStats(data=self.data)
        self.data = OffloadStats.make(self.data["name"]).data
        return taken

    def to_dict(self) -> dict[str, Any]:
        return {**self.data, "counters": dict(self.data["counters"])}

    def reset(self) -> None:
        self.data = OffloadStats.make(self.data.get("name", "")).data

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        assert isinstance(other, OffloadStats)
        if not self.data:
            self.data = OffloadStats.make(other.data["name"]).data
        self.data["counters"] = Counter(self.data["counters"]) + Counter(other.data["counters"])
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        return {**self.data["counters"], **self.data["gauges"]}

    def is_empty(self) -> bool:
        return not self.data or not (self.data["counters"] or self.data["gauges"])
