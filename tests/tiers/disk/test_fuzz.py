# SPDX-License-Identifier: Apache-2.0
"""Whole files changed at random: never a crash, never a wrong load."""

import pytest

from tests.tiers.disk.files import on_disk
from tests.tiers.disk.fuzz import KINDS, PLACES, fuzz


@pytest.mark.parametrize("seed", range(3))
def test_a_file_changed_at_random_is_never_a_wrong_load(tmp_path, seed):
    outcomes = fuzz(tmp_path / "root", 4 * len(PLACES), seed)
    assert {"header", "size", "checksum"} <= set(outcomes)
    assert outcomes["loaded"] < 30  # a forged header may change what no reader depends on


@pytest.mark.parametrize("kind", KINDS[1:])
def test_with_a_key_a_forged_file_is_never_loaded(tmp_path, kind):
    outcomes = fuzz(tmp_path / "root", 4 * len(PLACES), 7, kind)
    assert {"header", "size", "checksum"} <= set(outcomes)


def test_the_classes_of_bytes_cover_the_file():
    ends = [0, *(end for _, end in PLACES.values())]
    assert [begin for begin, _ in PLACES.values()] == ends[:-1]
    assert ends[-1] == on_disk()
