# SPDX-License-Identifier: Apache-2.0
"""A selection rule for ``bench/selection_engine.py``, in a module of its own because the engine imports it by name."""

from collections.abc import Collection, Sequence
from typing import ClassVar

from vllm_overlay.multi_connector.load_weight import LoadWeight
from vllm_overlay.multi_connector.selection_rules.weighted import Weighted


class Watched(Weighted):
    """The rule ``weighted``, which can be overruled, and then learns nothing."""

    forced: ClassVar[int | None] = None
    """The child that is forced to load, or None for nobody."""
    is_forced: ClassVar[bool] = False
    choices: ClassVar[list[int | None]] = []
    """The loaders of all requests that were not forced."""

    def __init__(self, load_weights: Sequence[LoadWeight]) -> None:
        super().__init__(load_weights)
        Watched.choices = []

    def worth(self, child: int, tokens: int) -> float:
        if self.is_forced:
            return float(tokens * (child == self.forced))
        return super().worth(child, tokens)

    def try_instead(self, offers: Sequence[int], best: int | None) -> int | None:
        return None if self.is_forced else super().try_instead(offers, best)

    def decided(self, offers: Sequence[int], asked_tokens: int, loader: int | None) -> None:
        if not self.is_forced:
            self.choices.append(loader)
            super().decided(offers, asked_tokens, loader)

    def about_to_decide(self, num_waiting: int, loads: Collection[tuple[int, int, float]]) -> None:
        super().about_to_decide(num_waiting, () if self.is_forced else loads)

    def load_ended(self, child: int, tokens: int, seconds: float, failed: bool) -> None:
        if not self.is_forced:
            super().load_ended(child, tokens, seconds, failed)

    def step_ended(self, tokens: int, seconds: float) -> None:
        if not self.is_forced:
            super().step_ended(tokens, seconds)
