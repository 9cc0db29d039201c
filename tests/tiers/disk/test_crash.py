# SPDX-License-Identifier: Apache-2.0
"""A short form of the crash test: a few dozen kills."""

import pytest

from tests.tiers.disk.crash import Crash
from tests.tiers.disk.crash_processes import CAPACITY, Tally


@pytest.mark.slow
def test_kill_9_leaves_nothing_wrong_nothing_unreadable_and_no_litter(tmp_path):
    crash = Crash(tmp_path / "root", seed=5)
    print("seed 5")
    while crash.tally.kills < 15 or not has_seen_enough(crash.tally):
        crash.round()
        assert crash.tally.is_sound, crash.tally
    assert crash.tally.most_bytes <= CAPACITY


def has_seen_enough(tally: Tally) -> bool:
    """Whether its processes got to store, as those of a busy machine may not."""
    return tally.objects_read > 100 and tally.by_call > 2 and tally.most_bytes > CAPACITY // 2
