# SPDX-License-Identifier: Apache-2.0
"""When a child that always loses is tried, so that one that has become fast is found. Pure.

Only a load can show how fast a child is. So each request that it could have loaded gives it credit: ``SHARE`` of the
time that the request takes as decided. Once the credit covers what its load is expected to take longer, it loads.
So trying a child costs at most ``SHARE`` of the time, however slow the child is. One that is a little slower is tried
often. All times are in tokens' worth of computing.
"""

SHARE = 0.01


class Exploration:
    """The credits of children whose weight is measured."""

    def __init__(self, num_children: int) -> None:
        self._credits = [0.0] * num_children

    def may_try(self, child: int, longer: float) -> bool:
        """Whether the credit covers a load that takes ``longer`` than what is best."""
        return self._credits[child] >= longer

    def lost(self, child: int, duration: float) -> None:
        """A request that ``child`` had tokens for takes ``duration`` without it."""
        self._credits[child] += SHARE * max(duration, 0.0)

    def loads(self, child: int) -> None:
        """It is tried, or the best."""
        self._credits[child] = 0.0
