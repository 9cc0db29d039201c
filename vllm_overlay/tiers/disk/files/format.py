# SPDX-License-Identifier: Apache-2.0
"""The bytes of an object's file: one page of header, then the payload padded with zeros (docs/disk-format.md)."""

import struct
from typing import NamedTuple

import msgspec

from vllm_overlay import versions
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.files.checksum import NO_SEAL, XXH3, Integrity, Seal
from vllm_overlay.tiers.disk.files.namespace import MAX_RANKS, check_stored_id
from vllm_overlay.tiers.memory import PAGE_BYTES

MAGIC = b"HKVOBJ\r\n"
VERSION = versions.DISK_OBJECT
HEADER_BYTES = PAGE_BYTES
MAX_PARENTS = 8
MAX_TOKENS = 1 << 40
"""No prompt has as many tokens, and the catalogue takes no more."""
MAX_PAYLOAD_BYTES = 1 << 40
"""An object passes through host memory as a whole, so none has a TiB in one rank."""

_FIXED = struct.Struct("<8sIIQQQQIIBBB5x32s32s8s32s8s16x")
_NAME = struct.Struct("<BB6x24s64s")
_NAMES_OFFSET = _FIXED.size
_CHECKSUM_OFFSET = HEADER_BYTES - 32


class FormatError(ValueError):
    """The bytes are not a header of this version, or not one that a writer of ours could have written."""


def padded_bytes(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def file_bytes(payload_bytes: int) -> int:
    """The exact size of the file of an object of ``payload_bytes``."""
    return HEADER_BYTES + padded_bytes(payload_bytes)


def counted_bytes(size: int) -> int:
    """What a file of that size counts against the capacity.

    A file larger than any object's (a sparse one, for example) is not ours and counts nothing.
    """
    return size if size <= file_bytes(MAX_PAYLOAD_BYTES) else 0


class Identity(NamedTuple):
    """What a reader knows of a file before it opens it; all of it must be what the header says."""

    fingerprint: bytes
    object_id: ObjectId
    file: File
    rank: int
    world_size: int
    payload_bytes: int


class ObjectHeader(msgspec.Struct, frozen=True, gc=False):
    """What a file says of itself: all that its row in the catalogue says. Names are those of stored objects.

    ``seal`` leaves the padding out. Only a sealed header can be written. ``write_object`` seals it.
    """

    fingerprint: bytes
    object_id: ObjectId
    parents: tuple[ObjectId, ...]
    start_tokens: int
    end_tokens: int
    payload_bytes: int
    rank: int
    world_size: int
    file: File
    is_private: bool = False
    seal: Seal = NO_SEAL

    @property
    def identity(self) -> Identity:
        return Identity(self.fingerprint, self.object_id, self.file, self.rank, self.world_size, self.payload_bytes)

    @property
    def planned(self) -> PlannedObject:
        """The object as the index knows it."""
        return PlannedObject(self.object_id, self.parents, self.start_tokens, self.end_tokens, self.payload_bytes)

    def sealed(self, seal: Seal) -> "ObjectHeader":
        """The same header for a payload with that seal."""
        return msgspec.structs.replace(self, seal=seal)

    def encode(self, integrity: Integrity = XXH3) -> bytes:
        """The header page. Raises FormatError when a field is out of its range."""
        try:
            body = self._body(integrity)
        except (ValueError, struct.error) as error:
            raise FormatError(str(error)) from error
        return body + integrity.header_checksum(body).ljust(HEADER_BYTES - _CHECKSUM_OFFSET, b"\0")

    def _body(self, integrity: Integrity) -> bytes:
        """The page before its checksum. Raises ValueError or struct.error."""
        self._check(integrity)
        body = bytearray(_CHECKSUM_OFFSET)
        _FIXED.pack_into(
            body, 0, MAGIC, VERSION, HEADER_BYTES, self.payload_bytes, self.start_tokens, self.end_tokens,
            self.file.number, self.rank, self.world_size, integrity.algorithm, len(self.parents), self.is_private,
            self.fingerprint, self.seal.checksum, integrity.key_id, self.seal.salt, bytes.fromhex(self.file.writer),
        )  # fmt: skip
        for place, object_id in enumerate((self.object_id, *self.parents)):
            check_stored_id(object_id)
            tag = object_id.tag.encode()
            offset = _NAMES_OFFSET + place * _NAME.size
            _NAME.pack_into(body, offset, len(tag), len(object_id.key), tag, object_id.key)
        return bytes(body)

    def _check(self, integrity: Integrity) -> None:
        """Raise ValueError for what ``struct`` would cut or what no object can be."""
        if len(self.fingerprint) != 32 or len(self.file.writer) != 16:
            raise ValueError("a fingerprint has 32 bytes, and a writer's name 16 hex digits")
        sizes = len(self.seal.checksum), len(self.seal.salt)
        if sizes != (integrity.payload_checksum_bytes, integrity.salt_bytes):
            raise ValueError(f"a payload's checksum and salt of {sizes} bytes are not of {integrity.name}")
        self._check_ranges(min(MAX_PAYLOAD_BYTES, integrity.max_payload_bytes))

    def _check_ranges(self, max_payload_bytes: int) -> None:
        """Raise ValueError for what no object can be."""
        if len(self.parents) > MAX_PARENTS or len(set(self.parents)) < len(self.parents):
            raise ValueError(f"an object has at most {MAX_PARENTS} parents, each once")
        are_tokens_possible = self.start_tokens <= self.end_tokens <= MAX_TOKENS
        is_rank_possible = self.rank < self.world_size <= MAX_RANKS
        if not (are_tokens_possible and is_rank_possible and 0 < self.payload_bytes <= max_payload_bytes):
            raise ValueError("token range, rank or size is impossible")

    @classmethod
    def decode(cls, page: bytes, integrity: Integrity = XXH3) -> "ObjectHeader":
        """The header in ``page``. Raises FormatError.

        Reads a fixed number of fields, whatever the bytes say. Only the checksum that ``integrity`` asks for counts.
        With a key, XXH3's is as wrong as any other.
        """
        if len(page) != HEADER_BYTES:
            raise FormatError(f"a header has {HEADER_BYTES} bytes, not {len(page)}")
        body, checksum = page[:_CHECKSUM_OFFSET], page[_CHECKSUM_OFFSET:]
        checksum_bytes = integrity.header_checksum_bytes
        if not integrity.verify_header(checksum[:checksum_bytes], body) or any(checksum[checksum_bytes:]):
            raise FormatError("the header's checksum is wrong")
        header = cls._decode_body(body)
        header = header.sealed(
            Seal(header.seal.checksum[: integrity.payload_checksum_bytes], header.seal.salt[: integrity.salt_bytes])
        )
        try:
            is_canonical = header._body(integrity) == body
        except (ValueError, struct.error) as error:
            raise FormatError(str(error)) from error
        if not is_canonical:
            raise FormatError("the key is another one, or bytes that must be zero are not")
        return header

    @classmethod
    def decode_unverified(cls, page: bytes) -> "ObjectHeader":
        """What a header of whatever key says, true or not. Raises FormatError.

        For files that are counted and removed in order, and never loaded: those of another key's namespace.
        """
        if len(page) != HEADER_BYTES:
            raise FormatError(f"a header has {HEADER_BYTES} bytes, not {len(page)}")
        header = cls._decode_body(page[:_CHECKSUM_OFFSET])
        try:
            header._check_ranges(MAX_PAYLOAD_BYTES)
        except ValueError as error:
            raise FormatError(str(error)) from error
        return header

    @classmethod
    def _decode_body(cls, body: bytes) -> "ObjectHeader":
        """All fields as they are. Only those that say what the others mean are checked. The seal has padding."""
        (
            magic, version, header_bytes, payload_bytes, start_tokens, end_tokens, number,
            rank, world_size, _, num_parents, is_private, fingerprint, checksum, _, salt, writer,
        ) = _FIXED.unpack_from(body)  # fmt: skip
        if (magic, version, header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
            raise FormatError(f"magic {magic!r} or version {version} is not ours")
        if num_parents > MAX_PARENTS:
            raise FormatError(f"an object has at most {MAX_PARENTS} parents")
        object_id, *parents = (_decode_name(body, place) for place in range(1 + num_parents))
        return cls(
            fingerprint, object_id, tuple(parents), start_tokens, end_tokens, payload_bytes,
            rank, world_size, File(writer.hex(), number), bool(is_private), Seal(checksum, salt),
        )  # fmt: skip


def _decode_name(page: bytes, place: int) -> ObjectId:
    tag_bytes, key_bytes, tag, key = _NAME.unpack_from(page, _NAMES_OFFSET + place * _NAME.size)
    try:
        object_id = ObjectId(tag[:tag_bytes].decode("ascii"), key[:key_bytes])
        check_stored_id(object_id)
    except ValueError as error:
        raise FormatError(str(error)) from error
    return object_id
