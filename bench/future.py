# SPDX-License-Identifier: Apache-2.0
"""What a whole trace says about each moment of it: next uses, and the most that any cache could restore."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bench.trace import TraceRequest

NEVER = float("inf")


class Future:
    """Knows all requests of a trace, by their place. ``block_tokens``: of one of the trace's ids."""

    def __init__(self, requests: Sequence[TraceRequest], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.num_shared: list[int] = []
        """For each request, how many leading blocks an earlier one had too, short of its last token."""
        self._uses: defaultdict[bytes, list[int]] = defaultdict(list)
        self._ends: defaultdict[bytes, list[int]] = defaultdict(list)
        seen: set[int] = set()
        for place, request in enumerate(requests):
            limit = min(len(request.block_ids), (request.num_tokens - 1) // block_tokens)
            shared = 0
            while shared < limit and request.block_ids[shared] in seen:
                shared += 1
            self.num_shared.append(shared)
            for block in request.block_ids[:shared]:
                self._uses[block.to_bytes(8, "little")].append(place)
            if shared:
                self._ends[request.block_ids[shared - 1].to_bytes(8, "little")].append(place)
            seen.update(request.block_ids)

    @property
    def bound_tokens(self) -> int:
        """Tokens restored by an unlimited tier with a state at every block."""
        return sum(self.num_shared) * self._block_tokens

    def next_use(self, key: bytes, is_state: bool, place: int) -> float:
        """The next request after ``place`` that could go on from this object: pass this block, or end at it."""
        places = (self._ends if is_state else self._uses).get(key, [])
        found = bisect_right(places, place)
        return places[found] if found < len(places) else NEVER

    def wanted_boundaries(self, place: int, keys: Sequence[bytes]) -> Iterable[int]:
        """Boundaries of this prompt at which a later request could go on."""
        for count, key in enumerate(keys, 1):
            if key in self._ends and self.next_use(key, True, place) < NEVER:
                yield count * self._block_tokens
