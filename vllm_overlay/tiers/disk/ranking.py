# SPDX-License-Identifier: Apache-2.0
"""What this engine thinks that its objects are worth, as times: the catalogue evicts by time, over all engines. And
what it has learned to think so, which the catalogue keeps over a restart."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from vllm_overlay import versions
from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.disk.catalogue import Catalogue, CatalogueError, Scored
from vllm_overlay.tiers.disk.files.root import Root
from vllm_overlay.tiers.policies.base import Ranked
from vllm_overlay.tiers.policies.guarded import GuardedPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.reuse import Learned

SHARE = 16
"""A ranking begins when this engine has stored 1/16 of the capacity since the last one began."""
LEAST_S, MOST_S = 0.1, 60.0
"""But no sooner and no later than so long after that. A tier that takes less than ``SHARE * LEAST_S`` to fill is small,
and soon ranked."""
logger = logging.getLogger(__name__)


class Ranker:
    """A learned policy that never evicts, and its rankings. Called from the scheduler's thread."""

    def __init__(
        self,
        geometry: Geometry,
        capacity_bytes: int,
        learned: Learned | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``learned`` is what an earlier ranker's ``learned`` returned."""
        self._learned = LearnedEviction(clock, learned=learned)
        self.policy = GuardedPolicy(self._learned)
        """Of the index: it is told what happens there."""
        self.policy.serve(geometry)
        self._clock = clock
        self._part_bytes = capacity_bytes / SHARE
        self._stored_bytes = 0
        self._began = clock()
        self._rest: Iterator[Ranked] | None = None
        self._found: list[Ranked] = []

    def learned(self) -> Learned:
        return self._learned.learned()

    def stored(self, num_bytes: int) -> None:
        """So much was stored."""
        self._stored_bytes += num_bytes

    def advance(self, deadline: float) -> list[Ranked] | None:
        """Rank on until ``deadline`` of ``time.perf_counter``. Returns a ranking once it is done, if one was due."""
        if self._rest is None:
            if not self._is_due():
                return None
            self._rest = self.policy.ranking()
        while time.perf_counter() < deadline:
            item = next(self._rest, None)
            if item is None:
                found, self._found, self._rest = self._found, [], None
                return found
            self._found.append(item)
        return None

    def _is_due(self) -> bool:
        since = self._clock() - self._began
        if since < LEAST_S or (since < MOST_S and self._stored_bytes < self._part_bytes):
            return False
        self._began += since
        self._stored_bytes = 0
        return True


def times_of(ranking: Sequence[Ranked], to_epoch_s: float) -> Iterator[Scored]:
    """The least worth of n gets the earliest of their n last uses, and so on. So they are, together, as old as before.

    What nobody can use any more gets 0. The ranking's clock and ``to_epoch_s`` are seconds since the epoch. Called in
    the bookkeeper's thread: numpy sorts while others run.

    The catalogue knows last uses by the second. So each time is in the second before, in the order of worth: else what
    is newer than a ranking, and has no time from one, might go before what was used in the same second.
    """
    usable = [item for item in ranking if item.used_at is not None]
    order = np.argsort(np.array([item.value for item in usable]), kind="stable")
    seconds = np.floor(np.sort(np.array([item.used_at for item in usable])) + to_epoch_s)
    times = seconds - 1 + np.arange(1, len(usable) + 1) / (len(usable) + 1)
    timed = zip((usable[place] for place in order.tolist()), times.tolist(), strict=True)
    useless = ((item, 0.0) for item in ranking if item.used_at is None)
    for item, evict_as in itertools.chain(useless, timed):
        for object_id in (item.object_id, *item.others):
            yield Scored(object_id, max(0.0, evict_as), item.until + to_epoch_s)


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the catalogue keeps over a restart."""

    version: int
    learned: Learned


def encode_learned(learned: Learned) -> bytes:
    return msgspec.json.encode(_Words(versions.LEARNED, learned))


def decode_learned(raw: bytes) -> Learned:
    """Raises ValueError for anything but numbers that this version can use."""
    words = msgspec.json.decode(raw, type=_Words)
    if words.version != versions.LEARNED or not words.learned.fits():
        raise ValueError("it is of another version, or of other roles, ages or properties")
    return words.learned


def read_learned(root: Root, fingerprint: str) -> Learned | None:
    """What is known at the start of a namespace; None: nothing. Called at start."""
    try:
        with contextlib.closing(Catalogue(root.path, root.journal)) as catalogue:
            raw = catalogue.learned(fingerprint)
        return None if raw is None else decode_learned(raw)
    except (CatalogueError, ConfigError, OSError, ValueError) as error:
        logger.warning("disk tier: what eviction has learned under %s is not used: %s", root.path, error)
        return None
