# SPDX-License-Identifier: Apache-2.0
"""The header, field by field."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.planner.objects import TAG_PATTERN, ObjectId
from vllm_overlay.tiers.disk.catalogue.rows import StoredObject, check_object
from vllm_overlay.tiers.disk.files.checksum import XXH3, EncryptedIntegrity, Seal
from vllm_overlay.tiers.disk.files.format import HEADER_BYTES, MAX_TOKENS, FormatError, ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.files.namespace import MAX_RANKS, DiskNamespace, parse_file_name

HEADER = ObjectHeader(
    fingerprint=bytes(range(32)),
    object_id=ObjectId("w12", b"k" * 32),
    parents=(ObjectId("f0", b"p" * 64), ObjectId("w12", b"q")),
    start_tokens=64,
    end_tokens=128,
    payload_bytes=10_000,
    rank=1,
    world_size=2,
    ticket=77,
    seal=Seal(b"c" * 16),
)


def sealed(page: bytearray) -> bytes:
    """The page with a header checksum that fits, as a hostile writer would have it."""
    page[-32:-16] = XXH3.header_checksum(bytes(page[:-32]))
    return bytes(page)


def test_a_header_reads_back_as_written():
    page = HEADER.encode()
    assert len(page) == HEADER_BYTES
    assert ObjectHeader.decode(page) == HEADER


def test_the_page_is_laid_out_as_documented():
    page = HEADER.encode()
    assert page[:8] == b"HKVOBJ\r\n"
    assert struct.unpack_from("<II", page, 8) == (1, 4096)
    assert struct.unpack_from("<QQQQ", page, 16) == (10_000, 64, 128, 77)
    assert struct.unpack_from("<IIBB", page, 48) == (1, 2, 1, 2)
    assert page[64:96] == HEADER.fingerprint
    assert page[96:128] == b"c" * 16 + bytes(16)
    assert page[128:192] == bytes(64)  # no key, no salt
    assert page[192:194] == bytes([3, 32])
    assert page[200:208] == b"w12" + bytes(5)
    assert page[208:272] == b"k" * 32 + bytes(32)
    assert page[272:274] == bytes([2, 64])


def test_any_flipped_bit_of_the_page_is_refused():
    page = HEADER.encode()
    for place in range(HEADER_BYTES):
        flipped = bytearray(page)
        flipped[place] ^= 1
        with pytest.raises(FormatError):
            ObjectHeader.decode(bytes(flipped))


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"X"),  # magic
        (8, b"\x02"),  # version
        (12, b"\xff"),  # header length
        (56, b"\x02"),  # encryption
        (56, b"\x03"),  # no algorithm
        (57, b"\x09"),  # too many parents
        (57, b"\xff"),  # far too many
        (58, b"\x01"),  # padding between fields
        (48, b"\x02"),  # rank beyond the world
        (24, b"\xff"),  # starts after its end
        (16, bytes(8)),  # no payload
        (120, b"\x01"),  # beyond the payload's checksum
        (128, b"\x01"),  # name of a key
        (136, b"\x01"),  # salt
        (167, b"\x01"),  # end of the salt
        (168, b"\x01"),  # padding before the names
        (192, b"\x00"),  # no kind
        (192, b"\xff"),  # kind longer than its field
        (193, b"\xff"),  # key longer than its field
        (193, b"\x00"),  # no key
        (200, b"../"),  # kind that is a path
        (200, b"\xff"),  # kind that is no text
        (195, b"\x01"),  # padding of a name
        (1000, b"\x01"),  # reserved
    ],
)
def test_a_hostile_header_with_a_fitting_checksum_is_refused(offset, value):
    page = bytearray(HEADER.encode())
    page[offset : offset + len(value)] = value
    with pytest.raises(FormatError):
        ObjectHeader.decode(sealed(page))


def test_a_header_with_names_up_to_its_end_is_refused():
    page = bytearray(HEADER.encode())
    for place in range(1, 49):
        page[192 + place * 80 : 272 + place * 80] = page[192:272]
    page[57] = 255
    with pytest.raises(FormatError):
        ObjectHeader.decode(sealed(page[:HEADER_BYTES]))


def test_a_header_of_another_length_is_refused():
    for page in (b"", HEADER.encode()[:-1], HEADER.encode() + b"\0"):
        with pytest.raises(FormatError):
            ObjectHeader.decode(page)


@pytest.mark.parametrize(
    "change",
    [
        {"parents": (HEADER.object_id,) * 9},
        {"parents": (HEADER.object_id,) * 2},
        {"end_tokens": MAX_TOKENS + 1},
        {"world_size": MAX_RANKS + 1},
        {"object_id": ObjectId("f1234", b"k")},
        {"object_id": ObjectId("f0", b"k" * 65)},
        {"ticket": 1 << 64},
        {"start_tokens": -1},
        {"fingerprint": b"short"},
        {"rank": 2},
        {"seal": Seal(b"c" * 15)},
        {"seal": Seal(b"c" * 32)},
        {"seal": Seal(b"c" * 16, b"s" * 32)},
    ],
)
def test_a_header_that_could_not_be_read_back_is_not_written(change):
    with pytest.raises(FormatError):
        msgspec.structs.replace(HEADER, **change).encode()


def test_a_header_has_the_sizes_of_its_algorithm_and_no_more_bytes_than_gcm_takes():
    integrity = EncryptedIntegrity.of(bytes(32))
    header = msgspec.structs.replace(HEADER, seal=Seal(b"t" * 16, b"s" * 32), payload_bytes=(1 << 36) - 32)
    assert ObjectHeader.decode(header.encode(integrity), integrity) == header
    with pytest.raises(FormatError, match="impossible"):
        msgspec.structs.replace(header, payload_bytes=(1 << 36) - 31).encode(integrity)
    for seal in (Seal(b"t" * 32, b"s" * 32), Seal(b"t" * 16), Seal(b"t" * 16, b"s" * 33)):
        with pytest.raises(FormatError, match="checksum and salt"):
            header.sealed(seal).encode(integrity)


NAMES = st.builds(
    ObjectId,
    st.from_regex(TAG_PATTERN, fullmatch=True, alphabet=st.characters(codec="ascii")),
    st.binary(min_size=1, max_size=64),
)
UNSIGNED = st.integers(0, 2**64 - 1)
TOKENS = st.integers(0, MAX_TOKENS)
KEYS = st.sampled_from([XXH3, EncryptedIntegrity.of(bytes(32))])


@st.composite
def sealed_headers(draw):
    """Any header that can be written, and what it is written with."""
    integrity = draw(KEYS)
    start, end = sorted((draw(TOKENS), draw(TOKENS)))
    world_size = draw(st.integers(1, MAX_RANKS))
    sizes = integrity.payload_checksum_bytes, integrity.salt_bytes
    return integrity, ObjectHeader(
        fingerprint=draw(st.binary(min_size=32, max_size=32)),
        object_id=draw(NAMES),
        parents=tuple(draw(st.lists(NAMES, max_size=8, unique=True))),
        start_tokens=start,
        end_tokens=end,
        payload_bytes=draw(st.integers(1, integrity.max_payload_bytes)),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        ticket=draw(UNSIGNED),
        seal=Seal(*(draw(st.binary(min_size=size, max_size=size)) for size in sizes)),
    )


@given(made=sealed_headers())
def test_the_catalogue_takes_any_object_whose_header_can_be_written(made):
    _, header = made
    num_bytes = file_bytes(header.payload_bytes)
    check_object(StoredObject(header.fingerprint.hex(), header.planned, header.world_size, num_bytes, 0, 0))


@given(made=sealed_headers(), place=st.integers(0, HEADER_BYTES - 1), change=st.integers(1, 255))
def test_any_header_reads_back_and_none_does_with_a_byte_changed_or_another_key(made, place, change):
    integrity, header = made
    page = bytearray(header.encode(integrity))
    assert ObjectHeader.decode(bytes(page), integrity) == header
    for other in (XXH3, EncryptedIntegrity.of(b"1" * 32)):
        if other != integrity:
            with pytest.raises(FormatError):
                ObjectHeader.decode(bytes(page), other)
    page[place] ^= change
    with pytest.raises(FormatError):
        ObjectHeader.decode(bytes(page), integrity)


@given(made=sealed_headers(), changes=st.dictionaries(st.integers(0, 1000), st.integers(0, 255), min_size=1))
def test_a_header_that_the_owner_of_the_key_sealed_reads_as_the_only_one_with_its_bytes(made, changes):
    integrity, header = made
    page = bytearray(header.encode(integrity))
    for place, value in changes.items():
        page[place] = value
    checksum = integrity.header_checksum(bytes(page[:4064]))
    page[4064:] = checksum.ljust(32, b"\0")
    with contextlib.suppress(FormatError):
        assert ObjectHeader.decode(bytes(page), integrity).encode(integrity) == page


def test_a_file_is_a_header_and_whole_pages():
    assert [file_bytes(size) for size in (1, 4096, 4097)] == [8192, 8192, 12288]


NAMESPACE = DiskNamespace("a" * 64, "b" * 64, {})


def test_paths_come_from_checked_names_only():
    path = NAMESPACE.path_of("/kv", ObjectId("f0", b"\xab\xcd"), 3)
    assert path == f"/kv/{'a' * 64}/ab/abcd.f0.r3"
    assert NAMESPACE.path_of("/kv", ObjectId("s", b"\xab"), 0) == f"/kv/{'b' * 64}/ab/ab.s.r0"
    for object_id in (ObjectId("../x", b"k"), ObjectId("f0/", b"k"), ObjectId("f0", b""), ObjectId("", b"k")):
        with pytest.raises(ValueError):
            NAMESPACE.path_of("/kv", object_id, 0)
    with pytest.raises(ValueError):
        NAMESPACE.path_of("/kv", ObjectId("f0", b"k"), -1)


def test_a_file_name_says_which_object_it_is():
    assert parse_file_name("abcd.f0.r3") == (ObjectId("f0", b"\xab\xcd"), 3)
    for name in (
        "abc.f0.r3",
        "abcd.f0.r03",
        "abcd.x0.r3",
        "ABCD.f0.r3",
        "abcd.f0.r3\n",
        ".tmp.1.2.3",
        "ab" * 65 + ".s.r0",
    ):
        assert parse_file_name(name) is None


@pytest.mark.parametrize("fingerprint", ["", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
def test_a_namespace_takes_fingerprints_only(fingerprint):
    with pytest.raises(ValueError, match="64 lower-case hex"):
        DiskNamespace(fingerprint, "b" * 64, {})
