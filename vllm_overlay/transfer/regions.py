# SPDX-License-Identifier: Apache-2.0
"""Parts of one buffer. Any part can be given back at any time."""

from bisect import insort


class Regions:
    """First fit. A request that finds no gap large enough gets nothing. Not thread-safe.

    The few regions that are out at a time make a list good enough.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._taken: list[tuple[int, int]] = []
        """(start, end), in order."""

    @property
    def num_free(self) -> int:
        """Bytes that are not taken, in all gaps together."""
        return self._num_bytes - sum(end - start for start, end in self._taken)

    def allocate(self, num_bytes: int) -> int | None:
        """The start of ``num_bytes``, at least 1, that nobody has. None when no gap is that large."""
        start = 0
        for taken_start, taken_end in self._taken:
            if start + num_bytes <= taken_start:
                break
            start = taken_end
        if start + num_bytes > self._num_bytes:
            return None
        insort(self._taken, (start, start + num_bytes))
        return start

    def free(self, start: int) -> None:
        """Give back the region that begins there. Raises StopIteration when none does."""
        self._taken.remove(next(region for region in self._taken if region[0] == start))
