# SPDX-License-Identifier: Apache-2.0
"""When a restore point will be used again: learned from those that were, and from those that were not."""

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Role(IntEnum):
    """What a restore point is to the prompts that pass it. Each role has its own course of reuse over time."""

    END = 0
    """Where a prompt ended that no later one has continued."""
    JUNCTION = 1
    """Where prompts part."""
    SUPERSEDED = 2
    """A prompt's end that a later prompt has continued: the next turn will look for the later one."""
    SPECULATIVE = 3
    """Where a prefill step ended and the prompt went on."""


FIRST_AGE_S, LAST_AGE_S, NUM_AGES = 4.0, 4096.0, 24
EDGES: tuple[float, ...] = (0.0, *np.geomspace(FIRST_AGE_S, LAST_AGE_S, NUM_AGES).tolist())
"""Of the bins of age, in seconds since the last use. What is older is as old as the last edge."""

PRIOR_REUSES_PER_S = {Role.END: 1.0, Role.JUNCTION: 1.0, Role.SUPERSEDED: 0.1, Role.SPECULATIVE: 0.02}
PRIOR_DELAY_S = 60.0
"""Before anything is known, reuse falls with age as 0.5 / (60 s + age), times the role's number: so what was used last
stays longest, as with an order by recency, and superseded and speculative points go first."""
PRIOR_COUNT = 0.5
"""Reuses that the prior stands for, in each bin of each role."""
FACTOR_COUNT = 8.0
"""Reuses that say that a property makes no difference."""

_EDGES = np.array(EDGES)
_WIDTHS = np.diff(_EDGES)
_PRIOR: Floats = np.outer(
    [PRIOR_REUSES_PER_S[role] * 0.5 for role in Role], 1 / (PRIOR_DELAY_S + (_EDGES[:-1] + _EDGES[1:]) / 2)
)

FACTORS = {"uses": 6, "length": 8, "new": 8, "hits": 10}
"""Properties of a restore point and how many levels each has: see ``levels_of``."""

LEVELS_PER_OCTAVE, OCTAVES = 4, 6


def levels_of(role: Role, boundary: int, num_new: int, turns: int, hits: int) -> tuple[int, int, int, int]:
    """The properties of a restore point, in the order of ``FACTORS``.

    Turns before it and hits on it; its tokens; those since the restore point before; hits, and whether it is a
    junction.
    """
    return (
        min(turns + hits, 5),
        min((boundary // 1024).bit_length(), 7),
        min((num_new // 512).bit_length(), 7),
        min(hits.bit_length(), 4) + (5 if role is Role.JUNCTION else 0),
    )


def _cumulative(rates: Floats) -> Floats:
    """Reuses that are expected up to each edge of the ages."""
    return np.concatenate([np.zeros((len(rates), 1)), np.cumsum(rates * _WIDTHS, axis=1)], axis=1)


Positive = Annotated[float, Meta(ge=1e-12, le=1e12)]
"""A number with which nothing overflows."""


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was learned, to be kept over a restart: rates of reuse a second by role and age, and factors on them."""

    rates: list[list[Positive]]
    factors: list[list[Positive]]

    def fits(self) -> bool:
        """Whether it has the roles, ages and properties of this version."""
        ages = [len(rates) for rates in self.rates]
        return ages == [NUM_AGES] * len(Role) and [len(one) for one in self.factors] == list(FACTORS.values())


class ReuseModel:
    """Watches restore points and tells which one is worth keeping for another second.

    The rate of reuse of a point is its role's rate at its age times a factor for each property. All are fitted to the
    last ``num_watched`` points of each role: reuses over what was expected, towards a prior.
    """

    def __init__(self, learned: Learned | None = None, num_watched: int = 4096, refit_after: int = 128) -> None:
        self._num_watched = num_watched
        self._refit_after = refit_after
        self._num_begun = [0] * len(Role)
        self._begun = np.zeros((len(Role), num_watched))
        self._age = np.zeros((len(Role), num_watched))
        self._reused = np.zeros((len(Role), num_watched), dtype=bool)
        self._levels = np.zeros((len(Role), num_watched, len(FACTORS)), dtype=np.int64)
        if learned is not None and not learned.fits():
            raise ValueError("what was learned is of another version: start without it")
        self._prior_rates: Floats = _PRIOR if learned is None else np.array(learned.rates)
        self._prior_factors: list[Floats] = (
            [np.ones(count) for count in FACTORS.values()]
            if learned is None
            else [np.array(factor) for factor in learned.factors]
        )
        self._rates = self._prior_rates
        self._factors = list(self._prior_factors)
        self.version = 0
        self._publish()

    # What happens.

    def begin(self, role: Role, levels: Sequence[int], now: float) -> int:
        """A point waits for its next use from now on; returns what to call ``end`` with."""
        number = self._num_begun[role]
        slot = role, number % self._num_watched
        self._begun[slot] = now
        self._age[slot] = np.nan
        self._reused[slot] = False
        self._levels[slot] = levels
        self._num_begun[role] = number + 1
        if sum(self._num_begun) % self._refit_after == 0:
            self.refit(now)
        return number

    def end(self, role: Role, number: int, now: float) -> None:
        """It was used again. Called once; too late is no error."""
        if number >= max(0, self._num_begun[role] - self._num_watched):
            slot = role, number % self._num_watched
            self._age[slot] = now - self._begun[slot]
            self._reused[slot] = True

    def cancel(self, role: Role, number: int) -> None:
        """It is another role's point from now on, and says nothing of this one. A negative number was never watched."""
        if number < 0:
            return
        if number == self._num_begun[role] - 1:
            self._num_begun[role] = number
        elif number >= max(0, self._num_begun[role] - self._num_watched):
            self._age[role, number % self._num_watched] = 0.0

    # What follows.

    def level(self, levels: Sequence[int]) -> int:
        """How much likelier than its role's average: the place of its factors' product in the tables."""
        total = 0.0
        for logs, level in zip(self._log_factors, levels, strict=True):
            total += logs[level]
        return min(max(round(total), 0), len(self._tables[0]) - 1)

    def worth(self, role: Role, level: int, age_s: float) -> float:
        """Reuses a second that are won by keeping a point for the best time to come (Gittins' index)."""
        table = self._tables[role][level]
        if age_s >= LAST_AGE_S:
            return float(table[-1] * LAST_AGE_S / age_s)
        place = bisect_right(EDGES, age_s) - 1
        low, high = EDGES[place], EDGES[place + 1]
        return table[place] + (table[place + 1] - table[place]) * (age_s - low) / (high - low)

    def learned(self) -> Learned:
        return Learned(self._rates.tolist(), [factor.tolist() for factor in self._factors])

    # How it is fitted.

    def refit(self, now: float) -> None:
        """Two rounds of: each rate, then each factor, as reuses over expected reuses."""
        counts = [min(count, self._num_watched) for count in self._num_begun]
        role = np.repeat(np.arange(len(Role)), counts)
        slots = role, np.concatenate([np.arange(count) for count in counts])
        age = np.where(np.isnan(self._age[slots]), now - self._begun[slots], self._age[slots])
        reused, levels = self._reused[slots], self._levels[slots]
        bins = np.minimum(np.searchsorted(_EDGES, age, side="right") - 1, NUM_AGES - 1)
        offset = np.minimum(age - _EDGES[bins], _WIDTHS[bins])
        cells = role * NUM_AGES + bins
        reuses = self._sums(cells, reused)
        product = self._product(levels)
        for _ in range(2):
            reached = self._sums(cells, product)
            passed = reached[:, ::-1].cumsum(axis=1)[:, ::-1] - reached
            at_risk = self._sums(cells, product * offset) + passed * _WIDTHS
            self._rates = (reuses + PRIOR_COUNT) / (at_risk + PRIOR_COUNT / self._prior_rates)
            before = _cumulative(self._rates)
            expected = before[role, bins] + self._rates[role, bins] * offset
            for place, factor in enumerate(self._factors):
                level = levels[:, place]
                others = product / factor[level]
                seen = np.bincount(level, weights=reused, minlength=len(factor))
                due = np.bincount(level, weights=expected * others, minlength=len(factor))
                self._factors[place] = (seen + FACTOR_COUNT) / (due + FACTOR_COUNT / self._prior_factors[place])
                product = others * self._factors[place][level]
        self._publish()

    @staticmethod
    def _sums(cells: NDArray[np.int64], weights: NDArray[Any]) -> Floats:
        """By role and age."""
        sums: Floats = np.bincount(cells, weights=weights, minlength=len(Role) * NUM_AGES).astype(np.float64)
        return sums.reshape(len(Role), NUM_AGES)

    def _product(self, levels: NDArray[np.int64]) -> Floats:
        product = np.ones(len(levels))
        for place, factor in enumerate(self._factors):
            product *= factor[levels[:, place]]
        return product

    def _publish(self) -> None:
        """Tables for ``worth``, as lists: they are read one number at a time."""
        self.version += 1
        middle = LEVELS_PER_OCTAVE * OCTAVES
        self._log_factors: list[list[float]] = [
            (np.log2(factor) * LEVELS_PER_OCTAVE).tolist() for factor in self._factors
        ]
        self._log_factors[0] = [value + middle for value in self._log_factors[0]]
        levels = 2.0 ** (np.arange(-middle, middle + 1) / LEVELS_PER_OCTAVE)
        hazard = _cumulative(self._rates)
        tables = np.empty((len(Role), len(levels), NUM_AGES + 1))
        for start in range(NUM_AGES):
            passed = hazard[:, None, start:] - hazard[:, None, start, None]
            survival = np.exp(-levels[:, None] * passed)
            held = np.cumsum((survival[:, :, 1:] + survival[:, :, :-1]) / 2 * _WIDTHS[start:], axis=2)
            tables[:, :, start] = ((1.0 - survival[:, :, 1:]) / held).max(axis=2)
        tables[:, :, NUM_AGES] = levels * self._rates[:, None, -1]
        self._tables: list[list[list[float]]] = tables.tolist()
