# SPDX-License-Identifier: Apache-2.0
"""Checksums with a key: what anybody without the key has written or changed is a miss."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3

from tests.tiers.disk.files import lose_catalogue, object_files, on_disk
from tests.tiers.disk.keys import OTHER_SECRET, make_key
from tests.tiers.disk.objects import OBJECT, chain
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair, settings, tier_pair
from tests.waiting import until
from vllm_overlay import cli, versions
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.base import Fingerprints, WorkerContext
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity, Seal, integrity_of
from vllm_overlay.tiers.disk.files.format import FormatError, ObjectHeader
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY, OBJECT_FORMAT, DiskNamespace
from vllm_overlay.tiers.disk.spec import DiskTierSpec


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key")


@pytest.fixture
def other_key(tmp_path):
    return make_key(tmp_path / "other-key", OTHER_SECRET)


def keyed_namespace(integrity: Integrity, marks: str) -> DiskNamespace:
    """As the connector's fingerprint makes it: other names for another key."""
    words = {"model": "tiny", INTEGRITY: integrity.name, OBJECT_FORMAT: versions.DISK_OBJECT}
    return DiskNamespace(marks[0] * 64, marks[1] * 64, words)


def forge(path: Path, integrity: Integrity, payload: bytes | None = None) -> None:
    """Seal the file anew, as somebody would who knows the format and not the key."""
    raw = path.read_bytes()
    payload = raw[4096 : 4096 + OBJECT] if payload is None else payload
    owner = integrity_of(str(path.parents[2].parent / "key"))
    header = ObjectHeader.decode(raw[:4096], owner).sealed(integrity.seal([memoryview(payload)]))
    path.write_bytes(header.encode(integrity) + payload + raw[4096 + OBJECT :])


def evil(path: Path) -> bytes:
    return bytes(byte ^ 1 for byte in path.read_bytes()[4096 : 4096 + OBJECT])


# Files.


def test_objects_written_with_a_key_are_read_with_it_and_found_after_a_restart(tmp_path, key):
    with tier_pair(tmp_path / "root", integrity_key_file=key) as made:
        made.store(chain("p", 3))
        assert made.reasons(chain("p", 3)) == [""] * 4
        assert {path.read_bytes()[56] for path in object_files(made.root)} == {2}
    with tier_pair(tmp_path / "root", integrity_key_file=key) as again:
        again.recovered()
        assert again.coverage(chain("p", 3)) == [True] * 4
        assert again.reasons(chain("p", 3)) == [""] * 4


def test_a_forged_object_with_a_fitting_checksum_is_a_miss_and_is_removed(tmp_path, key, other_key):
    with tier_pair(tmp_path / "root", integrity_key_file=key) as made:
        for name, integrity in (("plain", XXH3), ("another key", integrity_of(other_key))):
            planned = chain(name, 1)[0]
            made.store([planned])
            forge(made.path(planned), integrity, evil(made.path(planned)))
            (result,) = made.fetch([planned])
            assert (result.reason, result.is_bad) == ("header", True)
            assert not made.path(planned).exists()


def test_without_a_key_the_same_forgery_is_loaded(tmp_path):
    """Why there is a key: whoever knows the format can write what XXH3 takes."""
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root") as made:
        made.store([planned])
        path = made.path(planned)
        raw, payload = path.read_bytes(), evil(path)
        header = ObjectHeader.decode(raw[:4096]).sealed(XXH3.seal([memoryview(payload)]))
        path.write_bytes(header.encode() + payload + raw[4096 + OBJECT :])
        with pytest.raises(AssertionError):  # fetch compares the bytes with those that were stored
            made.fetch([planned])


@pytest.mark.parametrize("has_key", [False, True])
def test_without_the_key_or_with_another_nothing_is_loaded_or_recovered(tmp_path, key, other_key, has_key):
    with tier_pair(tmp_path / "root", integrity_key_file=key) as made:
        made.store(chain("p", 2))
    lose_catalogue(made.root)  # namespaces of different keys are different ones, so no engine would look here
    with tier_pair(tmp_path / "root", integrity_key_file=other_key if has_key else "") as again:
        again.recovered()
        assert again.coverage(chain("p", 2)) == [False] * 3
        assert set(again.reasons(chain("p", 2))) <= {"header", "missing"}


def test_a_payload_or_padding_changed_under_a_good_header_is_a_miss(tmp_path, key):
    with tier_pair(tmp_path / "root", integrity_key_file=key) as made:
        objects = chain("p", 3)[:3]
        made.store(objects)
        for planned, offset in zip(objects, (4096, 4096 + OBJECT - 1, 4096 + OBJECT), strict=True):
            raw = bytearray(made.path(planned).read_bytes())
            raw[offset] ^= 1
            made.path(planned).write_bytes(raw)
        assert made.reasons(objects) == ["checksum"] * 3


def test_files_of_another_place_do_not_pass_though_their_seal_is_good(tmp_path, key):
    with tier_pair(tmp_path / "root", integrity_key_file=key) as made:
        one, two = chain("p", 2)[:2]
        made.store([one, two])
        os.replace(made.path(one), made.path(two))
        assert made.reasons([two]) == ["header"]


def test_a_rotated_key_is_a_new_namespace_and_the_old_one_goes_when_room_is_needed(tmp_path, key, other_key):
    old, new = (keyed_namespace(integrity_of(path), mark) for path, mark in ((key, "ab"), (other_key, "cd")))
    with tier_pair(tmp_path / "root", namespace=old, integrity_key_file=key) as made:
        made.store(chain("p", 4))
        kept = [made.path(planned) for planned in chain("p", 4)[:4]]
    with tier_pair(
        tmp_path / "root", namespace=new, integrity_key_file=other_key, capacity_bytes=12 * on_disk()
    ) as again:
        again.recovered()
        assert all(path.exists() for path in kept)
        again.store(chain("q", 10))
        until(lambda: not any(path.exists() for path in kept))


def test_every_flipped_byte_of_a_keyed_header_is_refused(key):
    integrity = integrity_of(key)
    header = ObjectHeader(bytes(32), chain("p", 2)[1].object_id, (), 0, 64, 10, 0, 1, 7, Seal(b"c" * 32))
    page = header.encode(integrity)
    assert ObjectHeader.decode(page, integrity) == header
    for place in range(len(page)):
        flipped = bytearray(page)
        flipped[place] ^= 1
        with pytest.raises(FormatError):
            ObjectHeader.decode(bytes(flipped), integrity)


# The key's file.


def test_the_name_of_a_key_differs_and_does_not_hold_it(key, other_key):
    one, other = integrity_of(key), integrity_of(other_key)
    assert one == integrity_of(key)
    assert len({one.name, other.name, XXH3.name}) == 3
    assert one.key.hex() not in repr(one)
    assert bytes(range(32)) != one.key


def test_the_digests_of_weights_have_a_key_of_their_own(key, other_key):
    one = integrity_of(key)
    secret = Path(key).read_bytes()
    context = "vllm-overlay disk tier: key of weight digests, version 1"
    assert one.cache_key == blake3(secret, derive_key_context=context).digest()
    assert len({one.cache_key, one.key, integrity_of(other_key).cache_key}) == 3
    assert repr(one.cache_key) not in repr(one)
    assert XXH3.cache_key == b""


@pytest.mark.parametrize("has_key", [True, False])
def test_the_tier_gives_that_key_where_the_weights_are_read(tmp_path, key, has_key):
    given = []

    def fingerprints(weights_name, cache_directory, facts, cache_key):
        given.append(cache_key)
        return Fingerprints("ab" * 32, "cd" * 32, {})

    spec = DiskTierSpec(settings(tmp_path / "root", integrity_key_file=key if has_key else ""))
    geometry = SimpleNamespace(smallest_object_bytes=OBJECT, largest_object_bytes=OBJECT)
    worker, _ = spec.build_worker(WorkerContext(geometry, 0, 1, fingerprints))
    worker.close(0)
    assert given == [integrity_of(key).cache_key if has_key else b""]


def test_a_link_to_a_key_is_followed(tmp_path, key):
    (tmp_path / "link").symlink_to(key)
    assert integrity_of(str(tmp_path / "link")) == integrity_of(key)


@pytest.mark.parametrize(
    ("num_bytes", "mode", "words"),
    [
        (31, 0o600, "holds 31 bytes: create it with 32 random ones"),
        (70_000, 0o600, "holds too many bytes"),
        (32, 0o640, "has mode 0640, .* set its mode to 0600"),
        (32, 0o604, "set its mode to 0600"),
    ],
)
def test_a_key_that_is_short_or_not_private_is_refused_with_what_to_do(tmp_path, num_bytes, mode, words):
    path = make_key(tmp_path / "key", bytes(num_bytes))
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=words):
        integrity_of(path)


def test_a_missing_key_a_directory_and_a_pipe_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.* head -c 32 /dev/urandom"):
        integrity_of(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="integrity_key_file"):
        integrity_of(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        integrity_of(str(tmp_path / "pipe"))


def test_a_key_of_another_user_is_refused(key, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    os.chown(key, 54321, -1) if os.getuid() == 0 else monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        integrity_of(key)


def test_a_refused_key_refuses_the_tier(tmp_path):
    with pytest.raises(ConfigError, match="integrity_key_file"):
        TierPair(tmp_path / "root", integrity_key_file=str(tmp_path / "none"))


# Tools.


@pytest.fixture
def roots(tmp_path, key):
    """One root with a keyed namespace and a plain one."""
    with tier_pair(
        tmp_path / "root", namespace=keyed_namespace(integrity_of(key), "ab"), integrity_key_file=key
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
    status, report = run(capsys, "fsck", made.root, "--integrity-key-file", key)
    assert (status, report["num_objects"], report["findings"]) == (0, 4 + 3, [])
    files = object_files(made.root)
    for options in ([], ["--integrity-key-file", other_key]):
        status, report = run(capsys, "fsck", made.root, "--repair", *options)
        assert (status, report["num_objects"]) == (0, 3)
        assert [(note["what"], note["is_problem"]) for note in report["findings"]] == [("key", False)] * 2
        assert object_files(made.root) == files


def test_fsck_finds_a_forgery_and_repair_removes_it(roots, key, other_key, capsys):
    made, _ = roots
    paths = [made.path(planned) for planned in chain("p", 3)[1:3]]
    for path, integrity in zip(paths, (XXH3, integrity_of(other_key)), strict=True):
        forge(path, integrity)
    status, report = run(capsys, "fsck", made.root, "--integrity-key-file", key, "--repair")
    assert status == 0
    assert [found["what"] for found in report["findings"] if found["is_problem"]] == ["header"]  # the rest lies on top
    assert not any(path.exists() for path in paths)


def test_fsck_tries_both_where_no_words_say_what_a_namespace_needs(roots, key, capsys):
    made, _ = roots
    for path in made.root.glob("*/namespace.json"):
        path.unlink()
    status, report = run(capsys, "fsck", made.root, "--integrity-key-file", key)
    assert (status, report["num_objects"]) == (0, 7)


def test_stats_tell_keys_apart(roots, key, capsys):
    made, _ = roots
    _, report = run(capsys, "stats", made.root)
    assert {summary["integrity"] for summary in report["namespaces"]} == {integrity_of(key).name, ""}
    capsys.readouterr()
    cli.main(["stats", str(made.root), "--integrity-key-file", key])
    assert "checksums with the given key" in capsys.readouterr().out


def test_a_tool_refuses_a_key_that_it_cannot_use(roots, tmp_path, capsys):
    for command in (["stats"], ["fsck"], ["gc", "--max-bytes", "0"]):
        status = cli.main([command[0], str(roots[0].root), *command[1:], "--integrity-key-file", str(tmp_path / "no")])
        assert status == 2
        assert "integrity_key_file" in capsys.readouterr().err


def test_another_program_checks_a_file_as_documented(tmp_path, key):
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root", integrity_key_file=key) as made:
        made.store([planned])
        raw = made.path(planned).read_bytes()
    secret = Path(key).read_bytes()
    for data, where in ((raw[:4064], "header"), (raw[4096 : 4096 + OBJECT], "payload")):
        context = f"vllm-overlay disk tier: key of {where} checksums, version 2"
        checksum = blake3(data, key=blake3(secret, derive_key_context=context).digest()).digest()
        assert checksum == (raw[4064:4096] if where == "header" else raw[96:128])
    name = blake3(secret, derive_key_context="vllm-overlay disk tier: name of key, version 1").digest()
    assert raw[128:136] == name[:8]
    assert raw[136:168] == bytes(32)


def test_a_stored_payload_does_not_become_a_header(tmp_path, key):
    """Who may choose a payload gets its checksum from the file's header: it must not be one of a header."""
    wanted = chain("wanted", 1)[0]
    seal = Seal(b"chosen and stored before".ljust(32))
    header = ObjectHeader(bytes(32), wanted.object_id, (), 0, 64, OBJECT, 0, 1, 7, seal)
    forged = header.encode(integrity_of(key))[:4064]  # no secret is in these bytes
    oracle = chain("oracle", 1, len(forged))[0]
    with tier_pair(tmp_path / "root", integrity_key_file=key) as made:
        made.store_bytes(oracle, forged)
        signed = made.path(oracle).read_bytes()[96:128]
    with pytest.raises(FormatError):
        ObjectHeader.decode(forged + signed, integrity_of(key))
