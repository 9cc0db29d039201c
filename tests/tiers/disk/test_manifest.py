# SPDX-License-Identifier: Apache-2.0
"""``namespace.json`` is for people and tools: where it is missing nothing is lost, and it is written again."""

import errno
import os
from types import SimpleNamespace

import pytest

from tests.tiers.disk.files import let_age, lose_catalogue, object_files
from tests.tiers.disk.inside import is_member
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.disk.files import manifest
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.namespace import DESCRIPTION
from vllm_overlay.tiers.disk.files.root import open_root

WHOLE = chain("p", 20)


class NoManifest(Device):
    """Every ``namespace.json`` fails to get its name, until the test says otherwise."""

    def __init__(self) -> None:
        self.fails = True
        self.num_failures = 0

    def rename(self, source: str, target: str) -> None:
        if self.fails and os.path.basename(target) == DESCRIPTION:
            self.num_failures += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(source, target)


def manifests(root):
    return [(root / fingerprint / DESCRIPTION).exists() for fingerprint in NAMESPACE.fingerprints]


def remove_manifests(root):
    for fingerprint in NAMESPACE.fingerprints:
        (root / fingerprint / DESCRIPTION).unlink()


@pytest.fixture
def clock(monkeypatch):
    """That of the attempts to write the file."""
    now = [1000.0]
    monkeypatch.setattr(manifest, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_manifest_that_cannot_be_written_costs_no_object_at_a_shutdown_and_a_start(tmp_path):
    with tier_pair(tmp_path / "root", device=NoManifest()) as made:
        made.store(WHOLE)
    assert len(object_files(made.root)) == len(WHOLE)
    with tier_pair(made.root, namespace=OTHER_NAMESPACE) as other:
        other.store(chain("q", 1))
    assert manifests(made.root) == [False, False]
    assert len(object_files(made.root)) == len(WHOLE) + 2
    with tier_pair(made.root) as again:
        assert all(again.recovered().coverage(WHOLE))


def test_a_manifest_that_an_operator_removes_costs_no_object(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(WHOLE)
    remove_manifests(made.root)
    with tier_pair(made.root, namespace=OTHER_NAMESPACE) as other:
        other.store(chain("q", 1))
    with tier_pair(made.root) as again:
        assert all(again.recovered().coverage(WHOLE))


@pytest.mark.parametrize("has_lost_parents", [False, True])
def test_a_manifest_and_a_catalogue_that_an_operator_removes_cost_no_object(tmp_path, has_lost_parents):
    """Where the parents of snapshots lie is found from the snapshots themselves."""
    prompts = [chain(f"p{number}", 2) for number in range(8)]
    with tier_pair(tmp_path / "root") as made:
        for prompt in prompts:
            made.store(prompt)
    remove_manifests(made.root)
    lose_catalogue(made.root)
    if has_lost_parents:  # of most snapshots
        prompts.sort(key=lambda prompt: prompt[-1].object_id.key)
        while len(prompts) > 1:
            for planned in prompts.pop(0)[:-1]:
                made.path(planned).unlink()
    let_age(made.root)
    with tier_pair(made.root, namespace=OTHER_NAMESPACE) as other:
        other.recovered()
        other.store(chain("q", 1))
    with tier_pair(made.root) as again:
        again.recovered()
        assert all(all(again.coverage(prompt)) for prompt in prompts)


def test_a_manifest_that_is_removed_while_it_is_served_is_written_again(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        until(lambda: all(manifests(made.root)))
        remove_manifests(made.root)
        until(lambda: all(manifests(made.root)))


def test_a_manifest_that_could_not_be_written_is_tried_again_after_ever_longer_pauses(tmp_path, clock):
    device = NoManifest()
    with tier_pair(tmp_path / "root", device=device) as made:
        until(lambda: device.num_failures == 2)
        made.store(chain("p", 3))  # the bookkeeper works meanwhile
        assert device.num_failures == 2
        for pause, failures in ((1.0, 4), (2.0, 6), (4.0, 8)):
            clock[0] += pause
            until(lambda failures=failures: device.num_failures == failures)
        device.fails = False
        made.store(chain("q", 3))
        assert manifests(made.root) == [False, False]
        clock[0] += manifest.LONGEST_PAUSE_S
        until(lambda: all(manifests(made.root)))


def test_a_manifest_that_could_not_be_written_is_tried_once_more_at_the_end(tmp_path, clock):
    device = NoManifest()
    with tier_pair(tmp_path / "root", device=device) as made:
        until(lambda: device.num_failures == 2)
        device.fails = False
        assert manifests(made.root) == [False, False]
    assert manifests(made.root) == [True, True]


def test_an_empty_directory_of_a_namespace_goes(tmp_path):
    root = tmp_path / "root"
    open_root(Device(), str(root))
    for fingerprint in OTHER_NAMESPACE.fingerprints:
        (root / fingerprint / "ab").mkdir(parents=True)
    with tier_pair(root) as made:
        until(lambda: is_member(made.tier))
        until(lambda: not any((root / fingerprint).exists() for fingerprint in OTHER_NAMESPACE.fingerprints))
