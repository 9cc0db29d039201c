# SPDX-License-Identifier: Apache-2.0
"""What the reuse model learns from points that were used again and points that were not."""

import random

import pytest

from vllm_overlay.tiers.policies.reuse import LAST_AGE_S, Learned, ReuseModel, Role, levels_of

NEW = levels_of(Role.END, 4096, 4096, turns=0, hits=0)
OLD = levels_of(Role.END, 4096, 4096, turns=5, hits=0)


def worth(model: ReuseModel, role: Role, levels=NEW, age_s: float = 0.0) -> float:
    return model.worth(role, model.level(levels), age_s)


def test_the_prior_falls_with_age_and_puts_roles_in_order() -> None:
    model = ReuseModel()
    ages = [0.0, 1.0, 10.0, 100.0, 1000.0, LAST_AGE_S, 10 * LAST_AGE_S]
    course = [worth(model, Role.END, age_s=age) for age in ages]
    assert course == sorted(course, reverse=True) and len(set(course)) == len(course)
    assert worth(model, Role.SPECULATIVE) < worth(model, Role.SUPERSEDED) < worth(model, Role.END)


def watched(pause_s: float = 60.0, count: int = 2000, share: float = 0.5, levels=NEW, **options) -> ReuseModel:
    """Ends of which a share is used again after about the pause."""
    model, luck, now = ReuseModel(**options), random.Random(1), 0.0
    for _ in range(count):
        number = model.begin(Role.END, levels, now)
        if luck.random() < share:
            model.end(Role.END, number, now + pause_s * luck.uniform(0.8, 1.2))
        now += 1.0
    model.refit(now)
    return model


def test_a_point_is_worth_most_just_before_it_is_used_and_little_after() -> None:
    model = watched()
    course = [worth(model, Role.END, age_s=age) for age in (0.0, 40.0, 300.0)]
    assert course[1] > 2 * course[0] and course[0] > 5 * course[2]


def test_what_is_used_oftener_is_worth_more_in_proportion() -> None:
    rare, often = watched(share=0.1), watched(share=0.6)
    ratio = worth(often, Role.END, age_s=40.0) / worth(rare, Role.END, age_s=40.0)
    assert 3 < ratio < 12


def test_a_property_that_goes_with_reuse_counts_and_one_that_does_not_is_left_out() -> None:
    model, luck = ReuseModel(), random.Random(2)
    for now in range(3000):
        levels = luck.choice((NEW, OLD))
        number = model.begin(Role.END, levels, float(now))
        if luck.random() < (0.6 if levels is OLD else 0.1):
            model.end(Role.END, number, now + luck.expovariate(1 / 30))
    model.refit(3000.0)
    assert worth(model, Role.END, OLD) > 3 * worth(model, Role.END, NEW)
    length = model.learned().factors[1][NEW[1]]
    assert 0.5 < length < 2


def test_it_forgets_what_was_long_ago() -> None:
    model = watched(count=600, share=0.9, num_watched=300)
    now = 600.0
    for _ in range(300):
        model.begin(Role.END, NEW, now)
        now += 1.0
    model.refit(now + LAST_AGE_S)
    assert worth(model, Role.END, age_s=40.0) < worth(ReuseModel(), Role.END, age_s=40.0) / 5


def test_the_return_of_a_point_that_is_not_watched_any_more_changes_nothing() -> None:
    first, second = (watched(count=40, num_watched=10) for _ in range(2))
    second.end(Role.END, 3, 100.0)
    second.end(Role.JUNCTION, -1, 100.0)
    second.cancel(Role.END, 3)
    for model in (first, second):
        model.refit(200.0)
    assert first.learned() == second.learned()


@pytest.mark.parametrize("is_last", [True, False])
def test_a_point_that_turns_out_to_be_another_role_says_nothing_of_this_one(is_last: bool) -> None:
    with_it, without = watched(count=100, share=1.0), watched(count=100, share=1.0)
    number = with_it.begin(Role.END, NEW, 100.0)
    others = [] if is_last else [with_it, without]
    for model in others:
        model.end(Role.END, model.begin(Role.END, NEW, 101.0), 160.0)
    with_it.cancel(Role.END, number)
    for model in (with_it, without):
        model.refit(5000.0)
    assert worth(with_it, Role.END) == pytest.approx(worth(without, Role.END))


def test_what_was_learned_is_where_the_next_one_begins_and_yields_to_what_it_sees() -> None:
    learned = watched().learned()
    model = ReuseModel(learned)
    assert model.learned() == learned != ReuseModel().learned()
    before = worth(model, Role.END, age_s=40.0)
    for now in range(3000):
        model.begin(Role.END, NEW, float(now))
    model.refit(3000.0 + LAST_AGE_S)
    assert worth(model, Role.END, age_s=40.0) < before / 5


def test_it_is_fitted_again_after_so_many_points() -> None:
    model = ReuseModel(refit_after=10)
    before = model.version
    for now in range(25):
        model.begin(Role.END, NEW, float(now))
    assert model.version == before + 2


def test_levels_stay_within_their_factors() -> None:
    from vllm_overlay.tiers.policies.reuse import FACTORS

    for role in Role:
        for number in (0, 1, 10**9):
            levels = levels_of(role, number, number, number, number)
            assert all(0 <= level < count for level, count in zip(levels, FACTORS.values(), strict=True))


def test_a_value_that_was_learned_by_an_earlier_version_is_refused() -> None:
    with pytest.raises(ValueError, match="another version"):
        ReuseModel(Learned([[1.0]], [[1.0]]))
