# SPDX-License-Identifier: Apache-2.0
"""The header, field by field."""

import dataclasses
import struct

import pytest

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.checksum import XXH3
from vllm_overlay.tiers.disk.format import HEADER_BYTES, FormatError, ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.namespace import DiskNamespace, parse_file_name

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
    payload_checksum=b"c" * 16,
)


def sealed(page: bytearray) -> bytes:
    """The page with a header checksum that fits, as a hostile writer would have it."""
    page[-32:-16] = XXH3.checksum_of([bytes(page[:-32])])
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
    assert page[128:130] == bytes([3, 32])
    assert page[136:144] == b"w12" + bytes(5)
    assert page[144:208] == b"k" * 32 + bytes(32)
    assert page[208:210] == bytes([2, 64])


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
        (56, b"\x02"),  # checksum algorithm
        (57, b"\x09"),  # too many parents
        (57, b"\xff"),  # far too many
        (58, b"\x01"),  # padding between fields
        (48, b"\x02"),  # rank beyond the world
        (24, b"\xff"),  # starts after its end
        (16, bytes(8)),  # no payload
        (120, b"\x01"),  # beyond the payload's checksum
        (128, b"\x00"),  # no kind
        (128, b"\xff"),  # kind longer than its field
        (129, b"\xff"),  # key longer than its field
        (129, b"\x00"),  # no key
        (136, b"../"),  # kind that is a path
        (136, b"\xff"),  # kind that is no text
        (131, b"\x01"),  # padding of a name
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
        page[128 + place * 80 : 208 + place * 80] = page[128:208]
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
        {"object_id": ObjectId("f1234", b"k")},
        {"object_id": ObjectId("f0", b"k" * 65)},
        {"ticket": 1 << 64},
        {"start_tokens": -1},
        {"fingerprint": b"short"},
        {"rank": 2},
    ],
)
def test_a_header_that_could_not_be_read_back_is_not_written(change):
    with pytest.raises(FormatError):
        dataclasses.replace(HEADER, **change).encode()


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
