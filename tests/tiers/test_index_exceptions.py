# SPDX-License-Identifier: Apache-2.0
"""An index whose policy raises what no guard holds back."""

import pytest

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed


def test_after_a_policy_that_raised_each_ticket_can_be_committed_anew():
    class Raises(LeastRecentlyUsed[Entry]):
        left = 1

        def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
            if self.left and item.object_id.key == b"b":
                self.left -= 1
                raise KeyboardInterrupt
            super().add(item, last_use, end_tokens)

    index = PrefixIndex(100, Raises())
    planned = [PlannedObject(ObjectId("f0", key), (), 0, 64, 10) for key in (b"a", b"b", b"c")]
    for ticket, item in enumerate(planned):
        index.reserve(item, ticket)
    with pytest.raises(KeyboardInterrupt):
        index.commit_all(range(3))
    for ticket in range(3):
        index.commit(ticket)
    assert set(index.visible()) == {item.object_id for item in planned}
    index.abort(0)  # its ticket has ended
    assert index.has(planned[0].object_id)
