# SPDX-License-Identifier: Apache-2.0
"""The configured rule and the fence around it: a rule that raises ends itself, not the engine."""

from collections.abc import Collection, Sequence
from types import TracebackType

from vllm.logger import init_logger

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.multi_connector.load_weight import LoadWeight
from vllm_overlay.multi_connector.selection import Verdict, decide
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

    def __init__(self, name: str, rule: SelectionRule, load_weights: Sequence[LoadWeight]) -> None:
        """``name``: as the setting has it, for the log. ``load_weights``: each child's."""
        self._name = name
        self._load_weights = load_weights
        self.rule = rule
        self._fence = _Fence(self)

    def replace(self, error: BaseException) -> None:
        """The rule has raised: ``weighted`` takes its place. If it was that rule itself, it measures nothing now."""
        weights = self._load_weights
        if isinstance(self.rule, Weighted):
            weights = [LoadWeight(weight.number) for weight in weights]
        self.rule = Weighted(weights)
        logger.error("selection=%r has failed. From now on tokens x load_weight decide.", self._name, exc_info=error)

    def decide(self, offers: Sequence[int | None], ceiling: int, may_wait: bool) -> Verdict:
        """As ``selection.decide``, or a child that the rule wants to try instead."""
        with self._fence:
            return self._decide(offers, ceiling, may_wait)
        return self._decide(offers, ceiling, may_wait)

    def _decide(self, offers: Sequence[int | None], ceiling: int, may_wait: bool) -> Verdict:
        verdict = decide(offers, self.rule.worth, ceiling, may_wait)
        if verdict.wait:
            return verdict
        tried = self.rule.try_instead([offer or 0 for offer in offers], verdict.chosen)
        if tried is None or tried == verdict.chosen or not offers[tried]:
            return verdict
        return Verdict(tried, is_trial=True)

    def worth(self, child: int, tokens: int) -> float:
        with self._fence:
            return self.rule.worth(child, tokens)
        return self.rule.worth(child, tokens)

    def decided(self, offers: Sequence[int], asked_tokens: int, loader: int | None) -> None:
        with self._fence:
            self.rule.decided(offers, asked_tokens, loader)

    def about_to_decide(self, num_waiting: int, loads: Collection[tuple[int, int, float]]) -> None:
        with self._fence:
            self.rule.about_to_decide(num_waiting, loads)

    def load_ended(self, child: int, tokens: int, seconds: float, failed: bool) -> None:
        with self._fence:
            self.rule.load_ended(child, tokens, seconds, failed)

    def step_ended(self, tokens: int, seconds: float) -> None:
        with self._fence:
            self.rule.step_ended(tokens, seconds)
