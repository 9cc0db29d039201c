# SPDX-License-Identifier: Apache-2.0
"""What a child's ``load_weight`` is: the operator's number, or measured."""

from dataclasses import dataclass

AUTO = "auto"
"""The setting's value for a weight that is measured."""

UNKNOWN = 0.8
"""What an "auto" weight is until it is measured, for a connector of which nothing is known."""


@dataclass(slots=True, frozen=True)
class LoadWeight:
    """``number``: the weight; of a measured one what it is taken to be until it is measured."""

    number: float
    is_measured: bool = False
