# SPDX-License-Identifier: Apache-2.0
"""The bytes of an object's file: one page of header, then the payload padded with zeros (docs/disk-format.md)."""

import hmac
import struct
from typing import NamedTuple

import msgspec

from vllm_overlay import versions
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.catalogue.rows import MAX_PARENTS, MAX_RANKS, MAX_TOKENS
from vllm_overlay.tiers.disk.files.checksum import NO_SEAL, XXH3, Integrity, Seal
from vllm_overlay.tiers.disk.files.namespace import check_stored_id
from vllm_overlay.tiers.memory import PAGE_BYTES

MAGIC = b"HKVOBJ\r\n"
VERSION = versions.DISK_OBJECT
HEADER_BYTES = PAGE_BYTES
MAX_PAYLOAD_BYTES = 1 << 40
"""An object passes through host memory as a whole, so none has a TiB in one rank."""

_FIXED = struct.Struct("<8sIIQQQQIIBBB5x32s32s8s32s8s16x")
_NAME = struct.Struct("<BB6x24s64s")
_NAMES_OFFSET = _FIXED.size
_CHECKSUM_OFFSET = HEADER_BYTES - 32


class FormatError(ValueError):
    """The bytes are not a header of this version, or not one that a writer of ours could have written."""


def file_bytes(payload_bytes: int) -> int:
    """The exact size of the file of an object of ``payload_bytes``: the header and whole pages."""
    return HEADER_BYTES - (-payload_bytes // PAGE_BYTES) * PAGE_BYTES


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
        body = self._body(integrity)
        return body + integrity.header_checksum(body).ljust(HEADER_BYTES - _CHECKSUM_OFFSET, b"\0")

    def _body(self, integrity: Integrity) -> bytes:
        """The page before its checksum. Raises FormatError for what ``struct`` would cut or what no object can be."""
        sizes = len(self.seal.checksum), len(self.seal.salt)
        if len(self.fingerprint) != 32 or len(self.file.writer) != 16:
            raise FormatError("a fingerprint has 32 bytes, and a writer's name 16 hex digits")
        if sizes != (integrity.payload_checksum_bytes, integrity.salt_bytes):
            raise FormatError(f"a payload's checksum and salt of {sizes} bytes are not of {integrity.name}")
        self._check_ranges(min(MAX_PAYLOAD_BYTES, integrity.max_payload_bytes))
        body = bytearray(_CHECKSUM_OFFSET)
        try:
            _FIXED.pack_into(
                body, 0, MAGIC, VERSION, HEADER_BYTES, self.payload_bytes, self.start_tokens, self.end_tokens,
                self.file.number, self.rank, self.world_size, integrity.algorithm, len(self.parents), self.is_private,
                self.fingerprint, self.seal.checksum, integrity.key_id, self.seal.salt, bytes.fromhex(self.file.writer),
            )  # fmt: skip
            for place, object_id in enumerate((self.object_id, *self.parents)):
                check_stored_id(object_id)
                tag, offset = object_id.tag.encode(), _NAMES_OFFSET + place * _NAME.size
                _NAME.pack_into(body, offset, len(tag), len(object_id.key), tag, object_id.key)
        except (ValueError, struct.error) as error:
            raise FormatError(str(error)) from error
        return bytes(body)

    def _check_ranges(self, max_payload_bytes: int) -> None:
        """Raise FormatError for what no object can be."""
        if len(self.parents) > MAX_PARENTS or len(set(self.parents)) < len(self.parents):
            raise FormatError(f"an object has at most {MAX_PARENTS} parents, each once")
        are_tokens_possible = self.start_tokens <= self.end_tokens <= MAX_TOKENS
        is_rank_possible = self.rank < self.world_size <= MAX_RANKS
        if not (are_tokens_possible and is_rank_possible and 0 < self.payload_bytes <= max_payload_bytes):
            raise FormatError("token range, rank or size is impossible")

    @classmethod
    def decode(cls, page: bytes, integrity: Integrity = XXH3) -> "ObjectHeader":
        """The header in ``page``. Raises FormatError.

        Reads a fixed number of fields, whatever the bytes say. Only the checksum that ``integrity`` asks for counts.
        With a key, XXH3's is as wrong as any other.
        """
        header, body, checksum = cls._decode(page), page[:_CHECKSUM_OFFSET], page[_CHECKSUM_OFFSET:]
        if not hmac.compare_digest(checksum, integrity.header_checksum(body).ljust(len(checksum), b"\0")):
            raise FormatError("the header's checksum is wrong")
        header = header.sealed(
            Seal(header.seal.checksum[: integrity.payload_checksum_bytes], header.seal.salt[: integrity.salt_bytes])
        )
        if header._body(integrity) != body:
            raise FormatError("the key is another one, or bytes that must be zero are not")
        return header

    @classmethod
    def decode_unverified(cls, page: bytes) -> "ObjectHeader":
        """What a header of whatever key says, true or not. Raises FormatError.

        For files that are counted and removed in order, and never loaded: those of another key's namespace.
        """
        header = cls._decode(page)
        header._check_ranges(MAX_PAYLOAD_BYTES)
        return header

    @classmethod
    def _decode(cls, page: bytes) -> "ObjectHeader":
        """All fields as they are. Only those that say what the others mean are checked. The seal has padding."""
        if len(page) != HEADER_BYTES:
            raise FormatError(f"a header has {HEADER_BYTES} bytes, not {len(page)}")
        (
            magic, version, header_bytes, payload_bytes, start_tokens, end_tokens, number,
            rank, world_size, _, num_parents, is_private, fingerprint, checksum, _, salt, writer,
        ) = _FIXED.unpack_from(page)  # fmt: skip
        if (magic, version, header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
            raise FormatError(f"magic {magic!r} or version {version} is not ours")
        if num_parents > MAX_PARENTS:
            raise FormatError(f"an object has at most {MAX_PARENTS} parents")
        object_id, *parents = (_decode_name(page, place) for place in range(1 + num_parents))
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
