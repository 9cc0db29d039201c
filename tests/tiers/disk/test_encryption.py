# SPDX-License-Identifier: Apache-2.0
"""Encryption at rest: what lies on the disk says nothing without the key, and nothing that was changed is loaded."""

import contextlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.disk.files import lose_catalogue, on_disk
from tests.tiers.disk.keys import OTHER_SECRET, SECRET, make_key
from tests.tiers.disk.objects import OBJECT, UNIT, chain, content
from tests.tiers.disk.tier_pair import TierPair, tier_pair
from tests.waiting import until
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.checksum import XXH3, Seal, integrity_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.encryption import EncryptedIntegrity
from vllm_overlay.tiers.disk.files.format import Identity, ObjectHeader
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.files.object_file import BadObject, read_object
from vllm_overlay.tiers.memory import HostPool


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key")


@pytest.fixture
def other_key(tmp_path):
    return make_key(tmp_path / "other-key", OTHER_SECRET)


def encrypted(root: Path, key: str, **changes: object):
    return tier_pair(root, encryption_key_file=key, **changes)


# What is stored comes back.


def test_another_program_reads_a_file_as_documented(tmp_path, key):
    planned = chain("p", 1)[0]
    with encrypted(tmp_path / "root", key) as made:
        made.store([planned])
        raw = made.path(planned).read_bytes()
    base = blake3(SECRET, derive_key_context="vllm-overlay disk tier: key of object keys, version 1").digest()
    derived = blake3(raw[136:168], key=base).digest(length=44)
    ciphertext, tag = raw[4096 : 4096 + OBJECT], raw[96:112]
    assert AESGCM(derived[:32]).decrypt(derived[32:], ciphertext + tag, None) == bytes(content(planned, 0))
    name = blake3(SECRET, derive_key_context="vllm-overlay disk tier: name of encryption key, version 1").digest()
    assert raw[128:136] == name[:8]
    assert raw[112:128] == bytes(16)
    context = "vllm-overlay disk tier: key of header checksums of encrypted objects, version 1"
    assert raw[4064:4096] == blake3(raw[:4064], key=blake3(SECRET, derive_key_context=context).digest()).digest()
    assert raw[4096 + OBJECT :] == bytes(on_disk() - 4096 - OBJECT)


@given(pieces=st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=8), cuts=st.lists(st.integers(0, 800)))
def test_pieces_of_any_size_decrypt_what_pieces_of_any_other_encrypted(pieces, cuts):
    plain = b"".join(pieces)
    data = bytearray(plain)
    ends = np.cumsum([len(piece) for piece in pieces])
    views = [memoryview(data)[end - len(piece) : end] for piece, end in zip(pieces, ends, strict=True)]
    integrity = EncryptedIntegrity.of(bytes(32))
    seal = integrity.seal(views)
    for salt, wanted in ((seal.salt, True), (bytes(32), False)):
        copy = bytearray(data)
        places = [0, *sorted(cut % len(plain) for cut in cuts), len(plain)]
        parts = [memoryview(copy)[begin:end] for begin, end in itertools.pairwise(places)]
        assert integrity.unseal(Seal(seal.checksum, salt), parts) == wanted
        assert not wanted or copy == plain


# What the disk gets to see.


class Wiretap(Device):
    """Keeps all bytes that were to be written, those of removed files too."""

    def __init__(self) -> None:
        self.written = bytearray()

    def pwritev(self, fd, segments, offset):
        self.written += b"".join(segments)
        return super().pwritev(fd, segments, offset)


def plaintext_on_disk(made: TierPair, tap: Wiretap, objects) -> int:
    """How many of the objects' blocks of 16 bytes lie in any file under the root or went through the device."""
    haystacks = [path.read_bytes() for path in made.root.rglob("*") if path.is_file()] + [bytes(tap.written)]
    blocks = [
        bytes(data[place : place + 16])
        for data in (content(planned, 0) for planned in objects)
        for place in range(0, len(data) - 16, 160)
    ]
    return sum(any(block in haystack for haystack in haystacks) for block in blocks)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_no_plaintext_reaches_the_disk(tmp_path, key, is_encrypted):
    """Neither in files that stay nor in those that are evicted. Without a key the same search finds it."""
    tap, objects = Wiretap(), [planned for name in "abcdefgh" for planned in chain(name, 1)]
    changes = {"encryption_key_file": key} if is_encrypted else {}
    with tier_pair(tmp_path / "root", device=tap, capacity_bytes=9 * on_disk(), **changes) as made:
        made.store(objects)
        assert made.tier.usage().evicted_objects
        found = plaintext_on_disk(made, tap, objects)
    assert (found == 0) if is_encrypted else (found > 1000)


def test_equal_objects_are_different_on_disk(tmp_path, key):
    one, two = chain("p", 2)[:2]
    with encrypted(tmp_path / "root", key) as made:
        for planned in (one, two):
            made.store_at_last(planned, np.zeros(OBJECT, np.uint8))
        first, second = (made.path(planned).read_bytes() for planned in (one, two))
    assert first[136:168] != second[136:168]
    blocks = [raw[place : place + 16] for raw in (first, second) for place in range(4096, 4096 + OBJECT - 16, 16)]
    assert len(set(blocks)) == len(blocks)


# Whose files are taken.


@pytest.mark.parametrize("has_key", [False, True])
def test_without_the_key_or_with_another_nothing_is_loaded_or_recovered(tmp_path, key, other_key, has_key):
    with encrypted(tmp_path / "root", key) as made:
        made.store(chain("p", 2))
    lose_catalogue(made.root)  # namespaces of different keys are different ones, so no engine would look here
    with tier_pair(tmp_path / "root", encryption_key_file=other_key if has_key else "") as again:
        again.recovered()
        assert again.coverage(chain("p", 2)) == [False] * 3
        again.store(chain("p", 2))  # in new files
        assert again.reasons(chain("p", 2)) == [""] * 3


@pytest.mark.parametrize(("written", "read"), [("key", ""), ("key", "other_key"), ("", "key")])
def test_a_row_in_the_catalogue_is_no_key(tmp_path, request, written, read):
    """As if the namespaces of the keys were one."""
    keys = [request.getfixturevalue(name) if name else "" for name in (written, read)]
    with encrypted(tmp_path / "root", keys[0]) as made:
        made.store(chain("p", 2))
    with encrypted(tmp_path / "root", keys[1]) as again:
        assert again.recovered().coverage(chain("p", 2)) == [True] * 3
        assert again.reasons(chain("p", 2)) == ["header"] * 3


def forge(path: Path, payload: bytes) -> None:
    """Another payload with a checksum that fits, by somebody who knows the format and no key."""
    raw = path.read_bytes()
    header = ObjectHeader.decode_unverified(raw[:4096]).sealed(XXH3.seal([memoryview(payload)]))
    path.write_bytes(header.encode() + payload + raw[4096 + OBJECT :])


def test_a_forged_object_with_a_fitting_checksum_is_a_miss(tmp_path, key):
    planned = chain("p", 1)[0]
    with encrypted(tmp_path / "root", key) as made:
        made.store([planned])
        forge(made.path(planned), bytes(OBJECT))
        (result,) = made.fetch([planned])
        assert (result.reason, result.is_bad, result.buffer) == ("header", True, None)


def test_without_a_key_the_same_forgery_is_loaded(tmp_path):
    """Why there is a key: whoever knows the format, and may write the root, can write what XXH3 takes."""
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root") as made:
        made.store([planned])
        forge(made.path(planned), bytes(OBJECT))
        with pytest.raises(AssertionError):  # fetch compares the bytes with those that were stored
            made.fetch([planned])


def test_a_rotated_key_is_a_new_namespace_and_the_old_one_goes_when_room_is_needed(tmp_path, key, other_key):
    old, new = DiskNamespace("a" * 64, "b" * 64, {}), DiskNamespace("c" * 64, "d" * 64, {})
    with encrypted(tmp_path / "root", key, namespace=old) as made:
        made.store(chain("p", 4))
        kept = [made.path(planned) for planned in chain("p", 4)[:4]]
    with encrypted(tmp_path / "root", other_key, namespace=new, capacity_bytes=12 * on_disk()) as again:
        again.recovered()
        assert all(path.exists() for path in kept)
        again.store(chain("q", 10))
        until(lambda: not any(path.exists() for path in kept), "the old objects' end")


def small_file(root: Path, key: str) -> tuple[Path, Identity]:
    """The file of an object of 100 bytes."""
    planned = chain("p", 1, 100)[0]
    with encrypted(root, key) as made:
        made.store([planned])
        fingerprint = bytes.fromhex(made.namespace.fingerprint)
        return made.path(planned), Identity(fingerprint, planned.object_id, made.file(planned), 0, 1, 100)


def test_every_flipped_byte_of_an_encrypted_file_is_refused(tmp_path, key):
    path, identity = small_file(tmp_path / "root", key)
    good, integrity, buffer = path.read_bytes(), integrity_of(key), HostPool(1, UNIT).buffer([0], 100)
    for place in range(len(good)):
        flipped = bytearray(good)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(BadObject) as bad:
            read_object(Device(), str(path), identity, buffer, False, integrity)
        assert bad.value.reason == ("header" if place < 4096 else "checksum")
    path.write_bytes(good)
    read_object(Device(), str(path), identity, buffer, False, integrity)
    assert bytes(buffer.segments()[0]) == bytes(content(chain("p", 1, 100)[0], 0))


@pytest.mark.parametrize("field", ["checksum", "salt"])
def test_tag_and_salt_of_another_file_do_not_open_this_one(tmp_path, key, field):
    """Not even under a header with a good checksum, which nobody without the key can make."""
    one, two = chain("p", 2)[:2]
    integrity = integrity_of(key)
    with encrypted(tmp_path / "root", key) as made:
        made.store([one, two])
        raw, other = made.path(one).read_bytes(), made.path(two).read_bytes()
        header, foreign = (ObjectHeader.decode(page[:4096], integrity) for page in (raw, other))
        seal = header.seal._replace(**{field: getattr(foreign.seal, field)})
        made.path(one).write_bytes(header.sealed(seal).encode(integrity) + raw[4096:])
        (result,) = made.fetch([one])
        assert (result.reason, result.is_bad, result.buffer) == ("checksum", True, None)


# The key's file.


def test_the_name_of_a_key_differs_and_does_not_hold_it(key, other_key):
    one, other = integrity_of(key), integrity_of(other_key)
    assert one == integrity_of(key)
    assert len({one.name, other.name, XXH3.name}) == 3
    assert len({one.key, one.encryption_key, SECRET}) == 3
    for secret in (one.key, one.encryption_key):
        assert repr(secret) not in repr(one)


@pytest.mark.parametrize(
    ("num_bytes", "mode", "words"),
    [
        (31, 0o600, r"holds 31 bytes: create it with 32 random ones, `\(umask 077; head -c 32 /dev/urandom > FILE\)`"),
        (70_000, 0o600, "holds too many bytes"),
        (32, 0o640, "has mode 0640, .* set its mode to 0600"),
        (32, 0o604, "set its mode to 0600"),
    ],
)
def test_a_key_that_is_short_or_not_private_is_refused_with_what_to_do(tmp_path, num_bytes, mode, words, monkeypatch):
    path = make_key(tmp_path / "key", bytes(num_bytes))
    os.chmod(path, mode)
    if os.geteuid() == 0:
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=f"^encryption_key_file=.*{words}"):
        integrity_of(path)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o440, False), (0o640, False), (0o660, True), (0o444, True)])
def test_a_key_of_root_may_be_read_by_a_group_as_a_secret_in_a_container_is(tmp_path, mode, is_refused):
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of root's")
    path = make_key(tmp_path / "key", bytes(32))
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match="0440 where root owns it") if is_refused else contextlib.nullcontext():
        integrity_of(path)


def test_a_missing_key_and_a_directory_are_refused_by_the_tier(tmp_path):
    with pytest.raises(ConfigError, match=r"^encryption_key_file=.*No such file.* head -c 32 /dev/urandom"):
        TierPair(tmp_path / "root", encryption_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="encryption_key_file"):
        TierPair(tmp_path / "root", encryption_key_file=str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        integrity_of(str(tmp_path / "pipe"))


def test_a_link_to_a_key_is_followed(tmp_path, key):
    (tmp_path / "link").symlink_to(key)
    assert integrity_of(str(tmp_path / "link")) == integrity_of(key)


def test_a_key_of_another_user_is_refused(key, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    os.chown(key, 54321, -1) if os.getuid() == 0 else monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        integrity_of(key)
