# SPDX-License-Identifier: Apache-2.0
"""A tier after a reset, in the namespace of this process alone."""

from tests.tiers.disk.inside import served_namespace, wanted_namespace
from tests.tiers.disk.objects import content, fill
from tests.tiers.disk.tier_pair import TierPair
from tests.waiting import until


def is_serving_another(made: TierPair) -> bool:
    """Whether the bookkeeper has arrived in the namespace of the last reset."""
    return served_namespace(made.tier) == wanted_namespace(made.tier)


def store_after_reset(made: TierPair, planned, data=None) -> None:
    """Store it in the namespace of now; ``data`` for other bytes than ``content``."""
    tickets = []
    until(lambda: made.tier.advance() or tickets.append(made.tier.reserve(planned)) or tickets[-1])
    buffer = made.workers[0].begin_store(tickets[-1])
    fill(buffer, content(planned, 0) if data is None else data)
    made.workers[0].submit_store(tickets[-1], buffer)
    results = []
    until(lambda: results.extend(made.workers[0].poll()[0]) or results)
    assert results[0].reason is None
    made.tier.commit(tickets[-1].ticket)
