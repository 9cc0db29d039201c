# SPDX-License-Identifier: Apache-2.0
"""The commands on a root with encrypted objects."""

import json

import pytest

from tests.tiers.disk.files import object_files
from tests.tiers.disk.keys import OTHER_SECRET, make_key
from tests.tiers.disk.objects import OBJECT, chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from vllm_overlay import cli, versions
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY, OBJECT_FORMAT, DiskNamespace
from vllm_overlay.tiers.disk.files.object_file import BadObject, verify_file


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key")


@pytest.fixture
def other_key(tmp_path):
    return make_key(tmp_path / "other-key", OTHER_SECRET)


@pytest.fixture
def roots(tmp_path, key):
    """One root with an encrypted namespace and a plain one."""
    words = {"model": "tiny", INTEGRITY: integrity_of("", key).name, OBJECT_FORMAT: versions.DISK_OBJECT}
    with tier_pair(
        tmp_path / "root", encryption_key_file=key, namespace=DiskNamespace("a" * 64, "b" * 64, words)
    ) as made:
        made.store(chain("p", 3))
    plain = DiskNamespace("c" * 64, "d" * 64, NAMESPACE.description)
    with tier_pair(tmp_path / "root", namespace=plain) as other:
        other.store(chain("q", 2))
    return made, other


def run(capsys, *arguments):
    capsys.readouterr()
    status = cli.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_fsck_verifies_with_the_key_and_without_it_touches_nothing(roots, key, other_key, capsys):
    made, _ = roots
    status, report = run(capsys, "fsck", made.root, "--encryption-key-file", key)
    assert (status, report["num_objects"], report["findings"]) == (0, 4 + 3, [])
    files = object_files(made.root)
    for options in ([], ["--encryption-key-file", other_key], ["--integrity-key-file", key]):
        status, report = run(capsys, "fsck", made.root, "--repair", *options)
        assert (status, report["num_objects"]) == (0, 3)
        assert [(note["what"], note["is_problem"]) for note in report["findings"]] == [("key", False)] * 2
        assert "--encryption-key-file" in report["findings"][0]["detail"]
        assert object_files(made.root) == files


@pytest.mark.parametrize("has_words", [True, False])
def test_fsck_finds_a_changed_byte_and_repair_removes_the_file(roots, key, capsys, has_words):
    made, _ = roots
    path = made.path(chain("p", 3)[2])
    raw = bytearray(path.read_bytes())
    raw[4096 + OBJECT - 1] ^= 1
    path.write_bytes(raw)
    if not has_words:
        for words in made.root.glob("*/namespace.json"):
            words.unlink()
    status, report = run(capsys, "fsck", made.root, "--encryption-key-file", key, "--repair")
    assert (status, path.exists()) == (0, False)
    (problem,) = [found["what"] for found in report["findings"] if found["is_problem"]]
    assert problem in ("checksum", "header")  # the last of the algorithms that it tried says so
    assert not made.path(chain("p", 3)[3]).exists()  # it lay on top


def test_fsck_verifies_a_file_of_many_pieces(tmp_path, key):
    num_bytes = (5 << 20) + 7
    planned = chain("p", 1, num_bytes)[0]
    with tier_pair(
        tmp_path / "root", encryption_key_file=key, staging_bytes="64 MiB", max_object_bytes=num_bytes
    ) as made:
        made.store([planned])
        path = made.path(planned)
        assert verify_file(Device(), str(path), integrity=integrity_of("", key)).payload_bytes == num_bytes
        raw = bytearray(path.read_bytes())
        raw[3 << 20] ^= 1
        path.write_bytes(raw)
        with pytest.raises(BadObject, match="checksum"):
            verify_file(Device(), str(path), integrity=integrity_of("", key))


def test_stats_tell_that_a_namespace_is_encrypted_and_with_whose_key(roots, key, capsys):
    made, _ = roots
    _, report = run(capsys, "stats", made.root)
    assert {summary["integrity"] for summary in report["namespaces"]} == {integrity_of("", key).name, ""}
    cli.main(["stats", str(made.root), "--encryption-key-file", key])
    assert "encrypted with the given key" in capsys.readouterr().out
    cli.main(["stats", str(made.root)])
    assert f"encrypted with {integrity_of('', key).name}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["stats"], ["fsck"], ["gc", "--max-bytes", "0"]])
def test_a_tool_refuses_two_keys_and_one_that_it_cannot_use(roots, key, tmp_path, capsys, command):
    root, missing = str(roots[0].root), str(tmp_path / "no")
    for options in (["--encryption-key-file", missing], ["--encryption-key-file", key, "--integrity-key-file", key]):
        assert cli.main([command[0], root, *command[1:], *options]) == 2
        assert "encryption_key_file" in capsys.readouterr().err
