# SPDX-License-Identifier: Apache-2.0
"""What is measured for a child's ``load_weight``: what loads take, and what computing takes. Pure: no clock, no vLLM.

    load_seconds(tokens) = level x (fixed + tokens)

``fixed``, in tokens, is what every load costs beside its tokens: a recurrent state, a round trip. It is the shape of
the line and changes rarely: a Theil-Sen fit (Sen 1968) of the last loads. ``level``, in seconds a token, follows a tier
that becomes slow: the median of the last five loads. So two slow loads in a row change nothing, and three are believed.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

UNKNOWN = 0.8
"""What an "auto" weight is until it is measured, for a connector of which nothing is known."""
Load = tuple[int, float]
"""Tokens and seconds."""

LEVEL_LOADS = 5
_SHAPE_LOADS = 16
_ENOUGH_FOR_A_SHAPE = 8
_WIDE_ENOUGH_FOR_A_SHAPE = 2
"""Times that the largest load must have the tokens of the smallest."""
_ANOTHER_REGIME = 1.5
"""Times by which a level differs from an older one, so that both cannot be of one tier in one condition."""
_ALL_FIXED = 1e6
"""Times the largest load's tokens: the fixed part where seconds do not grow with the tokens."""
_STALE_AFTER = 16
"""Lost offers in a row after which a trial tells something, and a load that is faster than expected all there is."""
_STEPS = 16
_ENOUGH_STEPS = 3
_LARGE_STEP = 4
"""A step counts if it computes at least the largest's tokens divided by this: small ones cost more a token."""


@dataclass(slots=True, frozen=True)
class LoadWeight:
    """``number``: the weight. A measured weight is taken to be this until it is measured."""

    number: float
    is_measured: bool = False


class LoadTimes:
    """One child's. Until five loads are measured, the missing ones are what the child's prior weight promises."""

    def __init__(self, prior_weight: float) -> None:
        """``prior_weight``: the share of the time of computing that a load is taken to save, below 1."""
        self._prior_weight = prior_weight
        self._loads: deque[Load] = deque(maxlen=_SHAPE_LOADS)
        self._promised = LEVEL_LOADS
        self._fixed = 0.0
        self._measured_level = 0.0
        self._late: Sequence[Load] = ()
        self._lost_in_a_row = 0

    def seconds(self, tokens: int, compute_s: float) -> float:
        """What a load of ``tokens`` is expected to take, where computing one token takes ``compute_s``."""
        return self._level(compute_s) * (self._fixed + tokens)

    def under_way(self, loads: Iterable[Load]) -> None:
        """Its loads that have not ended, with the seconds so far. One that is late already counts as that slow."""
        self._late = tuple(loads)

    def lost(self) -> None:
        """It offered tokens and does not load: what was measured grows old."""
        self._lost_in_a_row += 1

    @property
    def is_stale(self) -> bool:
        """Whether a new measurement would tell something."""
        return self._lost_in_a_row >= _STALE_AFTER

    def ended(self, tokens: int, seconds: float, compute_s: float | None) -> None:
        """A load of ``tokens`` > 0 has ended. ``compute_s`` is None while nobody knows."""
        is_stale, self._lost_in_a_row = self.is_stale, 0
        if is_stale and compute_s is not None and seconds * _ANOTHER_REGIME < self.seconds(tokens, compute_s):
            self._loads.clear()
            self._promised = 0
        self._loads.append((tokens, seconds))
        self._promised = max(self._promised - 1, 0)
        if not self._promised:
            self._learn_shape()
            self._measured_level = statistics.median_low(self._last_levels())

    def _level(self, compute_s: float) -> float:
        if not self._promised and not self._late:
            return self._measured_level
        promised = [(1 - self._prior_weight) * compute_s] * self._promised
        levels = [*promised, *self._last_levels()]
        level = statistics.median_low(levels)
        late = [found for found in self._levels(self._late, self._fixed) if found > level]
        return statistics.median_low([*levels, *late][-LEVEL_LOADS:])

    def _levels(self, loads: Iterable[Load], fixed: float) -> list[float]:
        return [seconds / (fixed + tokens) for tokens, seconds in loads]

    def _last_levels(self) -> list[float]:
        return self._levels(list(self._loads)[-LEVEL_LOADS:], self._fixed)

    def _learn_shape(self) -> None:
        """The shape of the remembered loads, or the older ones are forgotten because they are of another regime."""
        if len(self._loads) < _ENOUGH_FOR_A_SHAPE:
            return
        fixed = self._fitted()
        levels = self._levels(self._loads, fixed)
        now, all_of_them = statistics.median(levels[-LEVEL_LOADS:]), statistics.median(levels)
        if max(now, all_of_them) <= _ANOTHER_REGIME * min(now, all_of_them):
            self._fixed = fixed
            return
        while len(self._loads) > LEVEL_LOADS:
            self._loads.popleft()

    def _fitted(self) -> float:
        """``fixed`` of the remembered loads; as it is where they are too much of one size to tell."""
        tokens, seconds = np.array(self._loads, dtype=float).T
        if tokens.max() < _WIDE_ENOUGH_FOR_A_SHAPE * tokens.min():
            return self._fixed
        one, other = np.triu_indices(len(tokens), 1)
        apart = tokens[one] != tokens[other]
        slope = float(np.median((seconds[other] - seconds[one])[apart] / (tokens[other] - tokens[one])[apart]))
        all_fixed = _ALL_FIXED * float(tokens.max())
        if slope <= 0:
            return all_fixed
        return min(max(float(np.median(seconds - slope * tokens)) / slope, 0.0), all_fixed)


class PrefillRate:
    """What computing a prompt's token takes: the median over the last large steps of the engine.

    So neither a first step's compilation nor a pause counts.
    """

    def __init__(self) -> None:
        self._largest = 0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self.seconds_per_token: float | None = None
        """None until three steps have been seen."""

    def step_ended(self, tokens: int, seconds: float) -> None:
        """A step that mostly computed prompts took ``seconds`` for ``tokens``."""
        self._largest = max(self._largest, tokens)
        if tokens * _LARGE_STEP < self._largest or seconds <= 0:
            return
        self._steps.append(seconds / tokens)
        if len(self._steps) >= _ENOUGH_STEPS:
            self.seconds_per_token = statistics.median(self._steps)


class StepTimes:
    """How long engine steps take: between the scheduler's plan and the workers' answer. Times are of one clock."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[float, int | None]] = deque(maxlen=64)
        self._last_ended = 0.0
        self._decodes: deque[float] = deque(maxlen=_STEPS)

    def planned(self, tokens: int, requests: int, now: float) -> None:
        """Remembers a step: one without tokens computes nothing, one that mostly decodes says nothing of prefill."""
        self._under_way.append((now, None if not tokens else tokens if tokens > 2 * requests else 0))

    def ended(self, now: float) -> tuple[int, float] | None:
        """The oldest step has ended: its tokens and seconds, or None when it says nothing of prefill."""
        if not self._under_way:
            return None
        planned_at, tokens = self._under_way.popleft()
        # Steps overlap with asynchronous scheduling: the later of both beginnings.
        started, self._last_ended = max(planned_at, self._last_ended), now
        if tokens:
            return tokens, now - started
        if tokens is not None:
            self._decodes.append(now - started)
        return None

    @property
    def one_more_s(self) -> float:
        """What one more step takes: the median of the last ones that mostly decoded; 0.0 until three have been seen."""
        return statistics.median(self._decodes) if len(self._decodes) >= _ENOUGH_STEPS else 0.0
