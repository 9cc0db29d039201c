# SPDX-License-Identifier: Apache-2.0
"""Selection rules for tests, named in settings by module path."""

from collections.abc import Collection, Sequence

from vllm_overlay.multi_connector.load_weight import LoadWeight
from vllm_overlay.multi_connector.selection_rules.base import SelectionRule


class Fewest(SelectionRule):
    """The offer with the fewest tokens, and what the rule heard. A child at ``refused`` is worth nothing."""

    refused: int | None = None

    def __init__(self, load_weights: Sequence[LoadWeight]) -> None:
        self.load_weights = list(load_weights)
        self.heard: list[tuple[object, ...]] = []

    def worth(self, child: int, tokens: int) -> float:
        return 1e6 / tokens if child != self.refused else 0.0

    def load_ended(self, child: int, tokens: int, seconds: float, failed: bool) -> None:
        self.heard.append(("load", child, tokens, seconds, failed))

    def step_ended(self, tokens: int, seconds: float) -> None:
        self.heard.append(("step", tokens, seconds))

    def decided(self, offers: Sequence[int], asked_tokens: int, loader: int | None) -> None:
        self.heard.append(("decided", list(offers), asked_tokens, loader))


class Raising(Fewest):
    """Raises ``error`` in the method ``where``, or answers garbage."""

    where = ""
    error: type[BaseException] = Exception
    refused = 1

    def _maybe_raise(self, where: str) -> None:
        if self.where == where:
            raise self.error(where)

    def worth(self, child: int, tokens: int) -> float:
        self._maybe_raise("worth")
        return "much" if self.where == "garbage" else super().worth(child, tokens)  # type: ignore[return-value]

    def try_instead(self, offers: Sequence[int], best: int | None) -> int | None:
        self._maybe_raise("try_instead")
        return 99 if self.where == "nobody" else None

    def about_to_decide(self, num_waiting: int, loads: Collection[tuple[int, int, float]]) -> None:
        self._maybe_raise("about_to_decide")

    def load_ended(self, child: int, tokens: int, seconds: float, failed: bool) -> None:
        self._maybe_raise("load_ended")

    def step_ended(self, tokens: int, seconds: float) -> None:
        self._maybe_raise("step_ended")

    def decided(self, offers: Sequence[int], asked_tokens: int, loader: int | None) -> None:
        self._maybe_raise("decided")


class Unfit(SelectionRule):
    """Cannot be made."""

    def __init__(self, load_weights: Sequence[LoadWeight]) -> None:
        raise OverflowError("too heavy")


class NoRule:
    """Not a rule."""
