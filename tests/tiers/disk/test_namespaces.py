# SPDX-License-Identifier: Apache-2.0
"""Namespaces that share a root: what nobody serves gives way to what is served."""

import os
from contextlib import ExitStack

import pytest

from tests.tiers.disk.files import bytes_under, object_files, on_disk
from tests.tiers.disk.objects import chain, conversations
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, store_many, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace


def test_of_a_namespace_that_nobody_serves_leaves_go_first(tmp_path):
    root = tmp_path / "root"
    capacity = 10 * on_disk()
    with tier_pair(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as other:
        other.store(chain("old", 8))
    for age, path in enumerate(sorted(object_files(root), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1_000_000 + age,) * 2)
    with tier_pair(root, capacity_bytes=capacity) as made:
        made.recovered()
        made.store(chain("new", 3))
        assert made.reasons(chain("new", 3)) == [""] * 4
        assert bytes_under(root) <= capacity
        assert made.coverage(chain("new", 3)) == [True] * 4
    left = [other.path(planned).exists() for planned in chain("old", 8)]
    assert left == sorted(left, reverse=True)
    assert any(left)


@pytest.mark.parametrize("is_served", [False, True])
def test_a_neighbour_that_needs_a_little_room_leaves_what_others_share(tmp_path, is_served):
    root = tmp_path / "root"
    prompts = conversations(count=12, shared=4, own=3)
    num_objects = len({item.object_id for prompt in prompts for item in prompt})
    capacity = (num_objects + 2) * on_disk()
    with ExitStack() as others:
        other = others.enter_context(tier_pair(root, namespace=OTHER_NAMESPACE, capacity_bytes=2 * capacity))
        for prompt in prompts:
            other.store([item for item in prompt if not other.tier.has_or_awaits(item.object_id)])
        if not is_served:
            others.close()
        with tier_pair(root, capacity_bytes=capacity) as made:
            made.recovered()
            made.store(chain("new", 5))
            until(lambda: bytes_under(root) <= capacity)
    with tier_pair(root, namespace=OTHER_NAMESPACE, capacity_bytes=2 * capacity) as other:
        other.recovered()
        num_left = len(object_files(root)) - len(chain("new", 5))
        assert num_left < num_objects
        assert len(other.tier.index) == num_left
        assert sum(all(other.coverage(prompt)) for prompt in prompts) >= len(prompts) // 2


def test_engines_whose_states_differ_share_chunks_and_not_snapshots(tmp_path):
    other_states = DiskNamespace(NAMESPACE.fingerprint, "e" * 64, NAMESPACE.description)
    with tier_pair(tmp_path / "root") as made, tier_pair(tmp_path / "root", namespace=other_states) as other:
        made.store(chain("p", 3))
        until(lambda: other.tier.advance() or other.coverage(chain("p", 3)) == [True, True, True, False], "the chunks")
        assert other.reasons(chain("p", 3)[:3]) == [""] * 3
        other.store(chain("p", 3)[3:])
        assert made.reasons(chain("p", 3)) == other.reasons(chain("p", 3)) == [""] * 4
        assert made.path(chain("p", 3)[3]) != other.path(chain("p", 3)[3])


def test_a_newcomer_gets_room_in_a_root_that_another_process_has_filled(tmp_path):
    root = tmp_path / "root"
    capacity = 24 * on_disk()
    with tier_pair(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as other:
        store_many(other, 10, lambda: None)
        with tier_pair(root, capacity_bytes=capacity) as made:
            made.recovered()
            made.store(chain("new", 7))
            assert bytes_under(root) <= capacity
            assert made.reasons(chain("new", 7)) == [""] * 8
            store_many(made, 10, lambda: None)
            assert not made.has(chain("new", 7)[-1])
            assert bytes_under(root) <= capacity
