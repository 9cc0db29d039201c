# SPDX-License-Identifier: Apache-2.0
"""Files of version 1 and of version 2 of the disk format are misses for each other's readers."""

import json
from types import SimpleNamespace

import pytest

from tests.tiers.disk import version_1
from tests.tiers.disk.keys import SECRET, make_key
from tests.tiers.disk.objects import OBJECT, chain, content
from tests.tiers.disk.tier_pair import NAMESPACE, settings, tier_pair
from vllm_overlay import cli, versions
from vllm_overlay.tiers.base import Fingerprints, WorkerContext
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
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


def root_of_version_1(root, words):
    """A root with one object of version 1, and what its namespace.json says of the facts that were hashed."""
    planned = chain("p", 1)[0]
    with tier_pair(root, namespace=DiskNamespace("a" * 64, "b" * 64, words)) as made:
        made.store([planned])
        path = made.path(planned)
        raw = path.read_bytes()
        path.write_bytes(page_of_version_1(b"") + bytes(content(planned, 0)) + raw[4096 + OBJECT :])
    return path


def test_fsck_leaves_a_namespace_of_another_version_alone(tmp_path, capsys):
    """A server of that version may serve it; when it does not, gc removes it."""
    path = root_of_version_1(tmp_path / "root", {"integrity": "xxh3"})
    for options in ([], ["--repair"]):
        assert cli.main(["fsck", str(tmp_path / "root"), *options, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        found = [(note["what"], note["is_problem"]) for note in report["findings"]]
        assert found == [("version", False)] * 2  # chunks and snapshots
        assert path.exists()
    assert cli.main(["gc", str(tmp_path / "root"), "--max-bytes", "0"]) == 0
    assert not path.exists()


def test_fsck_removes_a_file_of_version_1_where_no_words_say_so(tmp_path):
    path = root_of_version_1(tmp_path / "root", {"integrity": "xxh3", "object_format": 2})
    assert cli.main(["fsck", str(tmp_path / "root"), "--repair"]) == 0
    assert not path.exists()
