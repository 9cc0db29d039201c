# SPDX-License-Identifier: Apache-2.0
"""The configured rule and the fence around it: a rule that raises ends itself, not the engine."""

import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType

from vllm.logger import init_logger

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.multi_connector.selection import Offer, Verdict, decide
from vllm_overlay.multi_connector.selection_rules.base import SelectionRule
from vllm_overlay.multi_connector.selection_rules.weighted import Weighted

logger = init_logger(f"vllm.{__name__}")


class _Fence:
    """Holds what the rule raises. A class, because a generator costs a microsecond a child and lookup."""

    def __init__(self, guarded: "GuardedRule") -> None:
        self._guarded = guarded

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if error is None or isinstance(error, SHUTDOWN):
            return False
        self._guarded.replace(error)
        return True


class GuardedRule:
    """Called as the rule is. Once the rule has raised, ``weighted`` takes its place until the process ends."""

    def __init__(self, name: str, rule: SelectionRule) -> None:
        """``name``: as the setting has it, for the log."""
        self._name = name
        self.rule = rule
        self._has_failed = False
        self._fence = _Fence(self)

    def replace(self, error: BaseException) -> None:
        """The rule has raised: ``weighted`` takes its place."""
        self.rule, self._has_failed = Weighted(()), True
        logger.error("selection=%r has failed; from now on tokens x load_weight decide.", self._name, exc_info=error)

    def value_of(self, child: int) -> Callable[[int], float] | None:
        """What a number of tokens from ``child`` is worth; None: tokens x load_weight."""
        with self._fence:
            return self.rule.value_of(child)
        return None

    def decide(self, offers: Sequence[Offer], ceiling: int, may_wait: bool) -> Verdict:
        """As ``selection.decide``, whatever the offers' values do."""
        with self._fence:
            if not self._has_failed:
                return decide(offers, ceiling, may_wait)
        # All of them by weight, because seconds of one child cannot be held against tokens of another.
        return decide([dataclasses.replace(offer, value=None) for offer in offers], ceiling, may_wait)

    def load_measured(self, child: int, tokens: int, seconds: float) -> None:
        with self._fence:
            self.rule.load_measured(child, tokens, seconds)

    def step_measured(self, tokens: int, seconds: float) -> None:
        with self._fence:
            self.rule.step_measured(tokens, seconds)

    def lost_to_computing(self, child: int) -> None:
        with self._fence:
            self.rule.lost_to_computing(child)
