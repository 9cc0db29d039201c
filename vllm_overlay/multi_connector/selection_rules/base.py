# SPDX-License-Identifier: Apache-2.0
"""The interface of a selection rule."""

from collections.abc import Collection, Sequence

from vllm_overlay.multi_connector.load_weight import LoadWeight


class SelectionRule:
    """Says what loading from a child is worth, and hears what loading and computing took.

    One instance a MultiConnector and process, made at start; only the scheduler's asks it. Children are named by their
    index. All methods are called from the scheduler's thread. One that raises while serving ends the rule, not the
    engine: from then on ``weighted`` holds.
    """

    def __init__(self, load_weights: Sequence[LoadWeight]) -> None:
        """``load_weights``: each child's setting. What is raised here refuses the configuration."""

    def worth(self, child: int, tokens: int) -> float:
        """What loading ``tokens`` > 0 from ``child`` is worth.

        The offer that is worth most loads, the first of equals; one of 0 or less never loads. The worth must not fall
        and then rise with the tokens.
        """
        raise NotImplementedError

    def try_instead(self, offers: Sequence[int], best: int | None) -> int | None:
        """A child that loads though it is not the best, so that its loads are measured; None: nobody.

        ``offers``: each child's tokens, 0 for none. ``best``: the child of the best offer, None when none is worth it.
        """
        return None

    def decided(self, offers: Sequence[int], asked_tokens: int, loader: int | None) -> None:
        """A request is admitted. ``loader`` loads it, or with None it is computed.

        ``asked_tokens``: what the request needs beyond the device cache.
        """

    def about_to_decide(self, num_waiting: int, loads: Collection[tuple[int, int, float]]) -> None:
        """Before each decision. ``num_waiting``: requests that wait to be admitted behind this one.

        ``loads``: the asynchronous loads that have not ended, (child, tokens, seconds so far).
        """

    def load_ended(self, child: int, tokens: int, seconds: float, failed: bool) -> None:
        """An asynchronous load has ended, ``seconds`` after its blocks were allocated."""

    def step_ended(self, tokens: int, seconds: float) -> None:
        """An engine step that mostly computed prompts has ended; it computed ``tokens``."""
