# SPDX-License-Identifier: Apache-2.0
"""The interface of a selection rule."""

from collections.abc import Callable, Sequence


class SelectionRule:
    """Says what loading from a child is worth, and hears what loading and computing took.

    One instance a MultiConnector and process, made at start; only the scheduler's asks it. Children are named by their
    index. All methods are called from the scheduler's thread. One that raises while serving ends the rule, not the
    engine: from then on ``weighted`` holds.
    """

    def __init__(self, load_weights: Sequence[float]) -> None:
        """``load_weights``: each child's setting. What is raised here refuses the configuration."""

    def value_of(self, child: int) -> Callable[[int], float] | None:
        """Called once for each child and lookup. Returns what a number of tokens from ``child`` is worth.

        The offer with the highest value loads, the first of equals; one of 0 or less never loads. The function must not
        fall and then rise with the tokens. None: tokens x load_weight.
        """
        raise NotImplementedError

    def load_measured(self, child: int, tokens: int, seconds: float) -> None:
        """An asynchronous load has succeeded, ``seconds`` after its blocks were allocated."""

    def step_measured(self, tokens: int, seconds: float) -> None:
        """An engine step that mostly computed prompts has ended; it computed ``tokens``."""

    def lost_to_computing(self, child: int) -> None:
        """``child`` offered tokens that were worth 0 or less, and no child was chosen: they are computed."""
