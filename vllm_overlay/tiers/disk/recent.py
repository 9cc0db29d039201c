# SPDX-License-Identifier: Apache-2.0
"""Names that count for some time after they were added."""

import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_MOST_NAMES = 4096
_NameT = TypeVar("_NameT", bound=Hashable)


class Recent(Generic[_NameT]):
    """Names of the last ``seconds``, at most ``_MOST_NAMES`` of them. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._added: OrderedDict[_NameT, float] = OrderedDict()

    def add(self, name: _NameT) -> None:
        self._added[name] = time.monotonic()
        self._added.move_to_end(name)
        if len(self._added) > _MOST_NAMES:
            self._added.popitem(last=False)

    def discard(self, name: _NameT) -> None:
        self._added.pop(name, None)

    def __contains__(self, name: _NameT) -> bool:
        added = self._added.get(name)
        return added is not None and time.monotonic() - added < self._seconds

    def names(self) -> frozenset[_NameT]:
        """All of them."""
        while self._added and (oldest := next(iter(self._added))) not in self:
            del self._added[oldest]
        return frozenset(self._added)
