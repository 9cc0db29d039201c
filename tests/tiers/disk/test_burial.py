# SPDX-License-Identifier: Apache-2.0
"""What processes that ended left behind, and the namespaces of living ones, while somebody looks after the dead."""

import errno
import os
import threading
import time

import pytest

from tests.tiers.disk.files import object_files
from tests.tiers.disk.inside import catalogue_of
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import tier_pair
from tests.tiers.disk.waiting import until
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.maintenance import recovery


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(recovery, "DEATH_SETTLES_S", 0.2)
    monkeypatch.setattr(recovery, "PAUSE_S", 0.3)


def let_one_die(root):
    """A process that was killed before it stored anything."""
    catalogue = Catalogue(str(root))
    catalogue.join([], int(time.time()))
    catalogue.close()


def test_files_that_cannot_be_asked_for_while_the_dead_are_buried_are_not_gone(tmp_path, monkeypatch):
    lstat = os.lstat

    def failing(path, **how):
        if str(path).endswith(".r0") and threading.current_thread().name == "disk-recovery":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return lstat(path, **how)

    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        made.store(chain("p", 5))
        made.settled()
        monkeypatch.setattr("os.lstat", failing)
        let_one_die(made.root)
        until(lambda: not catalogue_of(made.tier).dead_members(), "a burial")
        assert all(made.settled().coverage(chain("p", 5)))
        assert len(object_files(made.root)) == 6
