# SPDX-License-Identifier: Apache-2.0
"""The rule ``weighted``: the most tokens x load_weight."""

from vllm_overlay.multi_connector.selection_rules.base import SelectionRule


class Weighted(SelectionRule):
    """Learns nothing. Also what holds after another rule has failed."""

    def value_of(self, child: int) -> None:
        return None
