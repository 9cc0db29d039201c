# SPDX-License-Identifier: Apache-2.0
"""Selection rules for tests, named in settings by module path."""

from collections.abc import Callable, Sequence

from vllm_overlay.multi_connector.selection_rules.base import SelectionRule


class Fewest(SelectionRule):
    """The offer with the fewest tokens, and what the rule heard. A child at ``refused`` is worth nothing."""

    refused: int | None = None

    def __init__(self, load_weights: Sequence[float]) -> None:
        self.load_weights = list(load_weights)
        self.heard: list[tuple[object, ...]] = []

    def value_of(self, child: int) -> Callable[[int], float]:
        return lambda tokens: 1e6 / tokens if tokens and child != self.refused else 0.0

    def load_measured(self, child: int, tokens: int, seconds: float) -> None:
        self.heard.append(("load", child, tokens, seconds))

    def step_measured(self, tokens: int, seconds: float) -> None:
        self.heard.append(("step", tokens, seconds))

    def lost_to_computing(self, child: int) -> None:
        self.heard.append(("lost", child))


class Raising(Fewest):
    """Raises ``error`` in the method ``where``, or in the value it gives."""

    where = ""
    error: type[BaseException] = Exception
    refused = 1

    def _maybe_raise(self, where: str) -> None:
        if self.where == where:
            raise self.error(where)

    def value_of(self, child: int) -> Callable[[int], float]:
        # Of the second child only: the first has already got its value.
        if child == 1:
            self._maybe_raise("value_of")

        def value(tokens: int) -> float:
            self._maybe_raise("value")
            return "much" if self.where == "garbage" else super(Raising, self).value_of(child)(tokens)  # type: ignore

        return value

    def load_measured(self, child: int, tokens: int, seconds: float) -> None:
        self._maybe_raise("load_measured")

    def step_measured(self, tokens: int, seconds: float) -> None:
        self._maybe_raise("step_measured")

    def lost_to_computing(self, child: int) -> None:
        self._maybe_raise("lost_to_computing")


class Unfit(SelectionRule):
    """Cannot be made."""

    def __init__(self, load_weights: Sequence[float]) -> None:
        raise OverflowError("too heavy")


class NoRule:
    """Not a rule."""
