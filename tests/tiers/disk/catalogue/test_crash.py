# SPDX-License-Identifier: Apache-2.0
"""A short form of ``python -m tests.tiers.disk.catalogue.crash``."""

from pathlib import Path

from tests.tiers.disk.catalogue import crash


def test_kills_lose_nothing_and_free_nothing_too_early(tmp_path: Path) -> None:
    print("seed 1")
    tally = crash.run(tmp_path, kills=12, seed=1)
    assert tally.kills == 12 and tally.in_statements and tally.committed
