# SPDX-License-Identifier: Apache-2.0
"""What is worth a write: nothing beyond a rate, and nothing that was not wanted often enough."""

import time
from collections import OrderedDict

from vllm_overlay.planner.objects import ObjectId

_MAX_COUNTED = 100_000


class WriteRate:
    """Limits bytes a second, with a burst of one second or of the largest object; 0 is no limit. Called from the
    scheduler's thread."""

    def __init__(self, bytes_per_s: int, largest_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst = max(bytes_per_s, largest_bytes)
        self._left = float(self._burst)
        self._then = time.monotonic()

    def allows(self, num_bytes: int) -> bool:
        if not self._bytes_per_s:
            return True
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._then) * self._bytes_per_s)
        self._then = now
        return num_bytes <= self._left

    def spend(self, num_bytes: int) -> None:
        """Takes so many bytes, which are being written."""
        self._left -= num_bytes


class UseCounter:
    """Counts how often each object was wanted. It remembers the last ``_MAX_COUNTED``. Called from the scheduler's
    thread."""

    def __init__(self, wanted_uses: int) -> None:
        self._wanted_uses = wanted_uses
        self._uses: OrderedDict[ObjectId, int] = OrderedDict()

    def is_due(self, object_id: ObjectId) -> bool:
        """Counts a use. Returns whether it is the n-th or a later one."""
        if self._wanted_uses <= 1:
            return True
        uses = self._uses[object_id] = self._uses.get(object_id, 0) + 1
        self._uses.move_to_end(object_id)
        if len(self._uses) > _MAX_COUNTED:
            self._uses.popitem(last=False)
        return uses >= self._wanted_uses
