# SPDX-License-Identifier: Apache-2.0
"""The rule ``cost``: the most seconds saved, by what loads and steps were measured to take."""

from collections.abc import Callable, Sequence

from vllm_overlay.multi_connector.cost_model import Line, LoadCost
from vllm_overlay.multi_connector.selection_rules.base import SelectionRule


class Cost(SelectionRule):
    """What a scheduler knows of all children's loads and of its own prefill."""

    def __init__(self, load_weights: Sequence[float]) -> None:
        """Before it is measured, the heaviest child's load is taken to cost nothing."""
        heaviest = max(load_weights, default=0.0)
        self.loads = [LoadCost(weight / heaviest if heaviest else 0.0) for weight in load_weights]
        self._steps = Line()
        self._load_weights = load_weights

    def load_measured(self, child: int, tokens: int, seconds: float) -> None:
        self.loads[child].measured(tokens, seconds)

    def step_measured(self, tokens: int, seconds: float) -> None:
        self._steps.add(tokens, seconds)

    def lost_to_computing(self, child: int) -> None:
        self.loads[child].lost_to_computing()

    @property
    def prefill_s_per_token(self) -> float | None:
        """None until enough steps have been seen."""
        return self._steps.coefficients()[1] if self._steps.is_known else None

    def value_of(self, child: int) -> Callable[[int], float]:
        """Seconds saved; tokens x load_weight until enough steps have been seen."""
        per_token = self.prefill_s_per_token
        if per_token is None:
            weight = self._load_weights[child]
            return lambda tokens: tokens * weight
        return lambda tokens: self.loads[child].saved_s(tokens, tokens * per_token) if tokens else 0.0
