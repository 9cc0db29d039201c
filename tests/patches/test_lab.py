# SPDX-License-Identifier: Apache-2.0
"""``near`` lets pass what another batch explains, and nothing else."""

import math
from typing import Any

import pytest

from tests.patches.lab import near

Best = dict[int, float]


def answer(*places: tuple[int, Best]) -> dict[str, Any]:
    """At each place the chosen token, and the best ones' logprobs."""
    return {"tokens": [token for token, _ in places], "best": [best for _, best in places]}


ONE = answer((7, {7: -1.0, 8: -1.03}), (3, {3: -0.5, 4: -2.0}))


@pytest.mark.parametrize(
    ("other", "is_near"),
    [
        (answer((7, {7: -1.04, 8: -1.2}), (3, {3: -0.54, 9: -2.0})), True),
        (answer((7, {7: -1.04, 8: -1.2}), (3, {3: -0.56, 4: -2.0})), False),
        (answer((8, {8: -1.0, 7: -1.02}), (9, {9: -3.0, 1: -4.0})), True),  # a near-tie; what follows is another text
        (answer((8, {8: -1.0, 7: -1.2}), (3, {3: -0.5, 4: -2.0})), False),
        (answer((8, {8: -1.0, 9: -1.02}), (3, {3: -0.5, 4: -2.0})), False),
        (answer((9, {9: -1.0, 7: -1.02}), (3, {3: -0.5, 4: -2.0})), False),
        (answer((7, {7: -1.0, 8: -1.03}), (4, {4: -0.5, 3: -0.52})), False),  # a near-tie in one of them alone
        (answer((7, {7: math.nan, 8: -1.03}), (3, {3: -0.5, 4: -2.0})), False),
        ({}, False),
    ],
)
def test_what_is_near(other: dict[str, Any], is_near: bool) -> None:
    assert near(ONE, other) is is_near
    assert near(other, ONE) is is_near
