# SPDX-License-Identifier: Apache-2.0
"""Files of version 1 and of version 2 of the disk format are misses for each other's readers."""

from types import SimpleNamespace

import pytest

from tests.tiers.disk import version_1
from tests.tiers.disk.keys import SECRET, make_key
from tests.tiers.disk.objects import OBJECT, chain, content
from tests.tiers.disk.tier_pair import NAMESPACE, settings, tier_pair
from vllm_overlay import versions
from vllm_overlay.tiers.base import Fingerprints, WorkerContext
from vllm_overlay.tiers.disk.spec import DiskTierSpec

KINDS = ["", "integrity_key_file", "encryption_key_file"]


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key")


def page_of_version_1(secret: bytes) -> bytes:
    planned = chain("p", 1)[0]
    return version_1.header(planned, bytes.fromhex(NAMESPACE.attention), bytes(content(planned, 0)), secret)


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_the_encoder_of_version_1_makes_what_its_reader_takes(secret):
    page = page_of_version_1(secret)
    assert len(page) == 4096
    assert version_1.is_header(page, secret)
    assert not version_1.is_header(page[:100] + b"?" + page[101:], secret)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_file_of_version_1_is_a_miss_and_goes(tmp_path, key, kind, secret):
    planned = chain("p", 1)[0]
    changes = {kind: key} if kind else {}
    with tier_pair(tmp_path / "root", **changes) as made:
        made.store([planned])
        path = made.path(planned)
        raw = path.read_bytes()
        path.write_bytes(page_of_version_1(secret) + bytes(content(planned, 0)) + raw[4096 + OBJECT :])
        (result,) = made.fetch([planned])
        assert (result.reason, result.is_bad, path.exists()) == ("header", True, False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_version_2_is_none_for_a_reader_of_version_1(tmp_path, key, kind):
    changes = {kind: key} if kind else {}
    with tier_pair(tmp_path / "root", **changes) as made:
        made.store(chain("p", 1))
        page = made.path(chain("p", 1)[0]).read_bytes()[:4096]
    assert page[:12] == b"HKVOBJ\r\n\x02\0\0\0"
    assert not version_1.is_header(page)
    assert not version_1.is_header(page, SECRET)


def test_servers_of_both_versions_have_different_directories(tmp_path):
    """Else each would remove what the other one has stored."""
    given = []

    def fingerprints(weights_name, cache_directory, facts, cache_key):
        given.append(facts)
        return Fingerprints("ab" * 32, "cd" * 32, {})

    geometry = SimpleNamespace(smallest_object_bytes=OBJECT, largest_object_bytes=OBJECT)
    spec = DiskTierSpec(settings(tmp_path / "root"))
    worker, _ = spec.build_worker(WorkerContext(geometry, 0, 1, fingerprints))
    worker.close(0)
    assert given == [{"integrity": "xxh3", "object_format": versions.DISK_OBJECT}]
