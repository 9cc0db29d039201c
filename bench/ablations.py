# SPDX-License-Identifier: Apache-2.0
"""The learned policy without one of its parts: what each is good for."""

from collections.abc import Callable, Sequence

from bench.hit_replay import Clock
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.policies.ghosts import Ghosts
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.reuse import FACTORS, LEVELS_PER_OCTAVE, OCTAVES, ReuseModel, Role
from vllm_overlay.tiers.policies.runs import Point
from vllm_overlay.tiers.policies.value import Values


class _WithoutFactors(ReuseModel):
    """Some properties make no difference."""

    def __init__(self, without: Sequence[str]) -> None:
        super().__init__()
        self._is_used = [name not in without for name in FACTORS]

    def _masked(self, levels: Sequence[int]) -> list[int]:
        return [level if used else 0 for level, used in zip(levels, self._is_used, strict=True)]

    def begin(self, role: Role, levels: Sequence[int], now: float) -> int:
        return super().begin(role, self._masked(levels), now)

    def level(self, levels: Sequence[int]) -> int:
        return super().level(self._masked(levels))


class _OneRole(ReuseModel):
    def begin(self, role: Role, levels: Sequence[int], now: float) -> int:
        return super().begin(Role.END, levels, now)

    def end(self, role: Role, number: int, now: float) -> None:
        super().end(Role.END, number, now)

    def cancel(self, role: Role, number: int) -> None:
        super().cancel(Role.END, number)

    def worth(self, role: Role, level: int, age_s: float) -> float:
        return super().worth(Role.END, level, age_s)


class _NothingLearned(ReuseModel):
    def refit(self, now: float) -> None:
        """The prior holds."""

    def level(self, levels: Sequence[int]) -> int:
        return LEVELS_PER_OCTAVE * OCTAVES


class _NoGhosts(Ghosts):
    def remember(self, point: Point, key: bytes) -> None:
        """What is gone is not watched."""


class _NothingSuperseded(LearnedEviction):
    def _continue(self, above: Point, point: Point) -> None:
        if not above.hits:
            super()._continue(above, point)
        else:
            point.turns = above.turns + 1


class _NotByBytes(Values):
    def bytes_of(self, point: Point) -> int:
        return 1


class _NotByTokens(Values):
    def tokens_of(self, point: Point) -> int:
        return 1


def _with_model(model_of: Callable[[], ReuseModel]) -> Callable[[Clock, int], LearnedEviction]:
    def make(clock: Clock, seed: int) -> LearnedEviction:
        policy = LearnedEviction(clock, seed)
        policy._model = model_of()
        return policy

    return make


def _with_values(values: type[Values]) -> Callable[[Clock, int], LearnedEviction]:
    class Valued(LearnedEviction):
        def serve(self, geometry: Geometry) -> None:
            super().serve(geometry)
            self._values = values(self._model, self._shape)

    return Valued


def _without_ghosts(clock: Clock, seed: int) -> LearnedEviction:
    policy = LearnedEviction(clock, seed)
    policy._ghosts = _NoGhosts()
    return policy


def _without(*names: str) -> Callable[[Clock, int], LearnedEviction]:
    return _with_model(lambda: _WithoutFactors(names))


ABLATIONS: dict[str, Callable[[Clock, int], LearnedEviction]] = {
    "without learning: the prior": _with_model(_NothingLearned),
    "without roles": _with_model(_OneRole),
    "without superseding": _NothingSuperseded,
    "without ghosts": _without_ghosts,
    "without bytes": _with_values(_NotByBytes),
    "without tokens": _with_values(_NotByTokens),
    "without all factors": _without(*FACTORS),
    **{f"without factor {name}": _without(name) for name in FACTORS},
}
