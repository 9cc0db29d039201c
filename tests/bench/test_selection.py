# SPDX-License-Identifier: Apache-2.0
"""Measured weights on simulated services stay near the best there is. Times are drawn from seeds, none is measured."""

import pytest

from bench.selection import CONDITIONS, NUMBERS, SERVICES, ratios, under_load, wrong_shares
from bench.services import Service, requests

INFORMED, AUTO = 0, -1


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
@pytest.mark.parametrize("service", SERVICES, ids=lambda one: f"{one.prefill_rate:g}-{one.disk_rate:g}")
def test_a_measured_weight_is_within_five_per_cent_of_who_knows_the_averages(service, condition):
    sides = ratios(service, condition, number=1500, seeds=1)
    assert sides[AUTO][0] <= 1.05 * sides[INFORMED][0]


def test_a_number_is_not_where_the_disk_is_slower_than_computing():
    service = Service(50_000, 1e9)
    sides = ratios(service, CONDITIONS[0], number=1500, seeds=1)
    assert all(mean > 1.1 for mean, _ in sides[1 : 1 + NUMBERS])


@pytest.mark.parametrize("share", [0.3, 1.1, 1.5])
@pytest.mark.parametrize("service", SERVICES[2:5], ids=lambda one: f"{one.prefill_rate:g}-{one.disk_rate:g}")
def test_under_load_it_is_near_the_best_number(service, share):
    nobody, *others = under_load(service, share, number=1000)
    numbers, (told, _) = others[:NUMBERS], others[NUMBERS:]
    assert told <= 1.15 * min(numbers)
    assert told < nobody


def test_a_weight_that_is_blind_to_the_queue_lets_it_grow():
    *_, told, blind = under_load(Service(50_000, 1e9), 1.5, number=1000)
    assert blind > 3 * told


def test_arrivals_are_those_of_their_seed():
    one, same, other = (list(requests(SERVICES[0], CONDITIONS[1], 50, seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_wrong_choices_are_shares_of_all_sides():
    assert len(wrong_shares(SERVICES[0], 300)) == len(ratios(SERVICES[0], CONDITIONS[0], 50, 1))
