# SPDX-License-Identifier: Apache-2.0
"""What a server's metrics say of a time: from its start, or from an earlier look, until now."""

from dataclasses import dataclass

from vllm_overlay.server.api_client import Metrics


@dataclass(frozen=True, slots=True)
class Interval:
    """``before`` None: since the server's start. Sums are over all engines of the server."""

    before: Metrics | None
    after: Metrics

    def amount(self, name: str, **labels: str) -> float:
        """By how much a counter, or a histogram's ``_sum`` or ``_count``, has grown. A server that was restarted in
        between began with 0 again, as Prometheus has it."""
        after = self.after.value(name, **labels)
        before = 0.0 if self.before is None else self.before.value(name, **labels)
        return after - before if after >= before else after

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The growth by one label's values; those without any are left out."""
        values = {sample.labels.get(label, "") for sample in self.after.samples(name, **labels)}
        grown = {value: self.amount(name, **{label: value}, **labels) for value in sorted(values)}
        return {value: amount for value, amount in grown.items() if amount}

    def mean(self, name: str, **labels: str) -> float | None:
        """Of a histogram; None when nothing was observed."""
        count = self.amount(f"{name}_count", **labels)
        return self.amount(f"{name}_sum", **labels) / count if count else None

    def now(self, name: str, **labels: str) -> float:
        """A gauge's present value."""
        return self.after.value(name, **labels)

    def worst(self, name: str, **labels: str) -> float:
        """A gauge's largest present value of all engines."""
        return self.worst_known(name, **labels) or 0.0

    def worst_known(self, name: str, **labels: str) -> float | None:
        """As ``worst``; None: no engine has said it yet."""
        return max((sample.value for sample in self.after.samples(name, **labels)), default=None)

    def connectors(self, name: str) -> list[str]:
        """The values of the label ``connector``, in the server's order."""
        return list(dict.fromkeys(sample.labels.get("connector", "") for sample in self.after.samples(name)))
