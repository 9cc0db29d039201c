# SPDX-License-Identifier: Apache-2.0
"""What a child's ``load_weight`` is: the operator's number, or measured."""

from dataclasses import dataclass

AUTO = "auto"
"""The setting's value for a weight that is measured."""

UNKNOWN = 0.8
"""What an "auto" weight is until it is measured, for a connector of which nothing is known."""


@dataclass(slots=True, frozen=True)
class LoadWeight:
    """``number``: the weight. A measured weight is taken to be this until it is measured."""

    number: float
    is_measured: bool = False
