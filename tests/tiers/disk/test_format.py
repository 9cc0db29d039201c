# SPDX-License-Identifier: Apache-2.0
"""The header, field by field."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import File, StoredObject
from vllm_overlay.tiers.disk.catalogue.rows import MAX_RANKS, MAX_TOKENS, check_objects
from vllm_overlay.tiers.disk.files.checksum import XXH3, Seal
from vllm_overlay.tiers.disk.files.encryption import EncryptedIntegrity
from vllm_overlay.tiers.disk.files.format import HEADER_BYTES, FormatError, ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.files.writer import MAX_NUMBER, is_writer_name, parse_name, path_of

WRITER = "0123456789abcdef"
HEADER = ObjectHeader(
    fingerprint=bytes(range(32)),
    object_id=ObjectId("w12", b"k" * 32),
    parents=(ObjectId("f0", b"p" * 64), ObjectId("w12", b"q")),
    start_tokens=64,
    end_tokens=128,
    payload_bytes=10_000,
    rank=1,
    world_size=2,
    file=File(WRITER, 77),
    seal=Seal(b"c" * 16),
)


def sealed(page: bytearray) -> bytes:
    """The page with a header checksum that fits, as a hostile writer would have it."""
    page[-32:-16] = XXH3.header_checksum(bytes(page[:-32]))
    return bytes(page)


def test_the_page_is_laid_out_as_documented():
    page = HEADER.encode()
    assert len(page) == HEADER_BYTES
    assert page[:8] == b"HKVOBJ\r\n"
    assert struct.unpack_from("<II", page, 8) == (1, 4096)
    assert struct.unpack_from("<QQQQ", page, 16) == (10_000, 64, 128, 77)
    assert struct.unpack_from("<IIBBB", page, 48) == (1, 2, 1, 2, 0)
    assert page[64:96] == HEADER.fingerprint
    assert page[96:128] == b"c" * 16 + bytes(16)
    assert page[128:168] == bytes(40)  # no key, no salt
    assert page[168:176] == bytes.fromhex(WRITER)
    assert page[176:192] == bytes(16)
    assert page[192:194] == bytes([3, 32])
    assert page[200:224] == b"w12" + bytes(21)
    assert page[224:288] == b"k" * 32 + bytes(32)
    assert page[288:290] == bytes([2, 64])


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
        (58, b"\x02"),  # neither private nor not
        (59, b"\x01"),  # padding between fields
        (48, b"\x02"),  # rank beyond the world
        (24, b"\xff"),  # starts after its end
        (16, bytes(8)),  # no payload
        (120, b"\x01"),  # beyond the payload's checksum
        (128, b"\x01"),  # name of a key
        (136, b"\x01"),  # salt
        (167, b"\x01"),  # end of the salt
        (176, b"\x01"),  # padding before the names
        (192, b"\x00"),  # no kind
        (192, b"\xff"),  # kind longer than its field
        (193, b"\xff"),  # key longer than its field
        (193, b"\x00"),  # no key
        (200, b"../"),  # kind that is a path
        (200, b"s12"),  # snapshot without all digits of its facts
        (200, b"\xff"),  # kind that is no text
        (195, b"\x01"),  # padding of a name
        (223, b"\x01"),  # beyond the kind
        (287, b"\x01"),  # beyond the key
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
    for place in range(1, 41):
        page[192 + place * 96 : 288 + place * 96] = page[192:288]
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
        {"object_id": ObjectId("s", b"k")},
        {"file": File(WRITER, 1 << 64)},
        {"file": File(WRITER[1:], 1)},
        {"file": File("x" * 16, 1)},
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
    st.from_regex(r"s[0-9a-f]{16}|[fw][0-9]{1,3}", fullmatch=True, alphabet=st.characters(codec="ascii")),
    st.binary(min_size=1, max_size=64),
)
WRITERS = st.binary(min_size=8, max_size=8).map(bytes.hex)
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
        file=File(draw(WRITERS), draw(st.integers(0, MAX_NUMBER))),
        is_private=draw(st.booleans()),
        seal=Seal(*(draw(st.binary(min_size=size, max_size=size)) for size in sizes)),
    )


@given(made=sealed_headers())
def test_the_catalogue_takes_any_object_whose_header_can_be_written(made):
    _, header = made
    num_bytes = file_bytes(header.payload_bytes)
    check_objects(
        [StoredObject(header.fingerprint.hex(), header.planned, header.file, header.world_size, num_bytes, 0)]
    )


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


def test_a_file_is_a_number_in_the_directory_of_its_writer():
    file = File(WRITER, 4096 * 3 + 5)
    assert path_of("/kv", file, 1) == f"/kv/{WRITER}/3/12293.r1"
    assert path_of("/kv", File(WRITER, 4095), 0) == f"/kv/{WRITER}/0/4095.r0"


def test_a_file_name_says_which_number_and_rank_it_is():
    assert parse_name("12293.r1") == (12293, 1)
    assert parse_name(f"{MAX_NUMBER}.r0") == (MAX_NUMBER, 0)
    for name in (
        "", "alive", "1", "1.r", "01.r0", "1.r00", "-1.r0", "1.r0\n", "1.r0.tmp", f"{MAX_NUMBER + 1}.r0", "1.s0", "٣.r0"
    ):  # fmt: skip
        assert parse_name(name) is None


def test_a_writer_is_sixteen_hex_digits():
    assert is_writer_name(WRITER)
    for name in ("", WRITER[1:], WRITER + "0", WRITER.upper(), WRITER[1:] + "\n", "..", "host-a"):
        assert not is_writer_name(name)


NAMESPACE = DiskNamespace("a" * 64, "b" * 64, {})


def test_a_snapshots_kind_says_what_its_states_depend_on():
    """So that engines whose states differ share their chunks, and no other engine's state is loaded."""
    chunk, snapshot = ObjectId("f0", b"k"), ObjectId("s", b"k")
    planned = PlannedObject(snapshot, (chunk,), 64, 64, 1)
    stored = NAMESPACE.stored(planned)
    assert (stored.object_id, stored.parents) == (ObjectId("s" + "b" * 16, b"k"), (chunk,))
    assert NAMESPACE.own(stored) == planned
    assert DiskNamespace("a" * 64, "c" * 64, {}).own(stored) is None
    assert DiskNamespace("a" * 64, "c" * 64, {}).own_id(chunk) == chunk


def test_a_reset_begins_a_private_namespace_with_another_fingerprint():
    one, two = NAMESPACE.since("1"), NAMESPACE.since("2")
    assert len({NAMESPACE.fingerprint, one.fingerprint, two.fingerprint}) == 3
    assert (NAMESPACE.is_private, one.is_private) == (False, True)
    assert one.snapshot_kind == NAMESPACE.snapshot_kind


@pytest.mark.parametrize("fingerprint", ["", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
def test_a_namespace_takes_fingerprints_only(fingerprint):
    with pytest.raises(ValueError, match="regex"):
        DiskNamespace(fingerprint, "b" * 64, {})
