# SPDX-License-Identifier: Apache-2.0
"""The commands on a root with encrypted objects."""

import pytest

from tests.cli.commands import run
from tests.cli.damage import flip
from tests.tiers.disk.files import object_files
from tests.tiers.disk.keys import OTHER_SECRET, make_key
from tests.tiers.disk.objects import OBJECT, chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from vllm_overlay import cli, versions
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY, OBJECT_FORMAT, DiskNamespace


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key")


@pytest.fixture
def other_key(tmp_path):
    return make_key(tmp_path / "other-key", OTHER_SECRET)


@pytest.fixture
def roots(tmp_path, key):
    """One root with an encrypted namespace and a plain one."""
    words = {"model": "tiny", INTEGRITY: integrity_of(key).name, OBJECT_FORMAT: versions.DISK_OBJECT}
    with tier_pair(
        tmp_path / "root", encryption_key_file=key, namespace=DiskNamespace("a" * 64, "b" * 64, words)
    ) as made:
        made.store(chain("p", 3))
    plain = DiskNamespace("c" * 64, "d" * 64, NAMESPACE.description)
    with tier_pair(tmp_path / "root", namespace=plain) as other:
        other.store(chain("q", 2))
    return made, other


def test_verify_reads_with_the_key_and_without_it_touches_nothing(roots, key, other_key, capsys):
    made, _ = roots
    status, report = run(capsys, "stats", made.root, "--verify", "--encryption-key-file", key)
    assert (status, report["verified"]["num_files"], len(report["verified"]["unverified"])) == (0, 4 + 3, 0)
    files = object_files(made.root)
    for options in ([], ["--encryption-key-file", other_key]):
        status, report = run(capsys, "stats", made.root, "--verify", "--remove", *options)
        verified = report["verified"]
        assert (status, set(verified["unverified"])) == (0, {made.namespace.fingerprint})
        assert object_files(made.root) == files
    assert cli.main(["stats", str(made.root), "--verify"]) == 0
    assert f"--encryption-key-file with {integrity_of(key).name}" in capsys.readouterr().out


def test_a_changed_byte_is_found_and_its_file_removed(roots, key, capsys):
    made, _ = roots
    path = made.path(chain("p", 3)[2])
    flip(path, 4096 + OBJECT - 1)
    status, report = run(capsys, "stats", made.root, "--encryption-key-file", key, "--verify", "--remove")
    assert (status, path.exists()) == (0, False)
    assert [found["why"] for found in report["verified"]["problems"]] == ["checksum"]


def test_stats_tell_that_a_namespace_is_encrypted_and_with_whose_key(roots, key, capsys):
    made, _ = roots
    _, report = run(capsys, "stats", made.root)
    assert {summary["integrity"] for summary in report["namespaces"]} == {integrity_of(key).name, "xxh3"}
    cli.main(["stats", str(made.root), "--encryption-key-file", key])
    assert "encrypted with the given key" in capsys.readouterr().out
    cli.main(["stats", str(made.root)])
    assert f"encrypted with {integrity_of(key).name}" in capsys.readouterr().out


def test_a_key_that_cannot_be_used_is_refused(roots, tmp_path, capsys):
    assert cli.main(["stats", str(roots[0].root), "--encryption-key-file", str(tmp_path / "no")]) == 2
    assert "encryption_key_file" in capsys.readouterr().err
