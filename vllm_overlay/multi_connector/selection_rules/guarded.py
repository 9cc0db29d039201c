# SPDX-License-Identifier: Apache-2.0
"""The configured rule and the fence around it: a rule that raises ends itself, not the engine."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from vllm.logger import init_logger

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.multi_connector.selection import Offer, Verdict, decide
from vllm_overlay.multi_connector.selection_rules.base import SelectionRule
from vllm_overlay.multi_connector.selection_rules.weighted import Weighted

logger = init_logger(f"vllm.{__name__}")


class GuardedRule:
    """Called as the rule is. Once the rule has raised, ``weighted`` takes its place until the process ends."""

    def __init__(self, name: str, rule: SelectionRule) -> None:
        """``name``: as the setting has it, for the log."""
        self._name = name
        self.rule = rule
        self._has_failed = False

    def value_of(self, child: int) -> Callable[[int], float] | None:
        """What a number of tokens from ``child`` is worth; None: tokens x load_weight."""
        with self._fence():
            return self.rule.value_of(child)
        return None

    def decide(self, offers: Sequence[Offer], ceiling: int, may_wait: bool) -> Verdict:
        """As ``selection.decide``, whatever the offers' values do."""
        with self._fence():
            if not self._has_failed:
                return decide(offers, ceiling, may_wait)
        # All of them by weight, because seconds of one child cannot be held against tokens of another.
        return decide([dataclasses.replace(offer, value=None) for offer in offers], ceiling, may_wait)

    def load_measured(self, child: int, tokens: int, seconds: float) -> None:
        with self._fence():
            self.rule.load_measured(child, tokens, seconds)

    def step_measured(self, tokens: int, seconds: float) -> None:
        with self._fence():
            self.rule.step_measured(tokens, seconds)

    def lost_to_computing(self, child: int) -> None:
        with self._fence():
            self.rule.lost_to_computing(child)

    @contextlib.contextmanager
    def _fence(self) -> Iterator[None]:
        try:
            yield
        except SHUTDOWN:
            raise
        except BaseException:
            self.rule, self._has_failed = Weighted(()), True
            logger.exception("selection=%r has failed; from now on tokens x load_weight decide.", self._name)
