# SPDX-License-Identifier: Apache-2.0
"""Whose files under a root are believed: by owner and mode."""

import os

import pytest

from tests.tiers.disk.files import lose_catalogue
from tests.tiers.disk.halves import HALVES
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay.config import ConfigError


@HALVES
@pytest.mark.parametrize("mode", [0o770, 0o2770, 0o707])
def test_a_root_that_others_may_write_is_refused(tmp_path, start, mode):
    root = tmp_path / "root"
    start(root)
    root.chmod(mode)
    with pytest.raises(ConfigError, match=rf"root=.* mode {mode:04o}, so others may write it: .*mode to 0700"):
        start(root)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_a_miss_and_stays(tmp_path, said, mode):
    objects = chain("p", 2)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
        made.path(objects[0]).chmod(mode)
        assert made.reasons(objects) == ["owner", "", ""]
        assert not made.fetch(objects[:1])[0].is_bad
        assert made.path(objects[0]).exists()
        assert said("an object was not loaded (owner)")
    lose_catalogue(made.root)  # which would know the object, and the file would be a miss again
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        assert made.coverage(objects) == [False] * 3
        until(lambda: said("not recovered (owner)"), "a word of it")
    assert all(made.path(planned).exists() for planned in objects)
    made.path(objects[0]).chmod(0o600)
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        until(lambda: made.tier.advance() or made.coverage(objects) == [True] * 3)


def test_a_file_of_another_user_is_a_miss_and_stays(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    objects = chain("p", 2)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
        os.chown(made.path(objects[0]), 65534, 65534)
        assert made.reasons(objects) == ["owner", "", ""]
    lose_catalogue(made.root)
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        assert made.coverage(objects) == [False] * 3
    assert all(made.path(planned).exists() for planned in objects)


@pytest.mark.parametrize("depth", ["namespace", "fan-out"])
def test_what_lies_in_a_directory_that_others_may_write_is_not_recovered_and_stays(tmp_path, said, depth):
    objects = chain("p", 3)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    for planned in objects:
        os.utime(made.path(planned), (1, 1))  # too old to be on its way
    directory = made.path(objects[0]).parent if depth == "fan-out" else tmp_path / "root" / NAMESPACE.attention
    directory.chmod(0o770)
    lose_catalogue(made.root)
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        assert made.coverage(objects) == [False] * 4
        assert said(f"{directory} has mode 0770")
    assert all(made.path(planned).exists() for planned in objects)
    directory.chmod(0o700)
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        until(lambda: made.tier.advance() or made.coverage(objects) == [True] * 4)
