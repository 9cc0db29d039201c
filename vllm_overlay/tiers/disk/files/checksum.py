# SPDX-License-Identifier: Apache-2.0
"""How a file proves its bytes: by a checksum that finds accidents, or encrypted (``encryption``)."""

import hmac
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import xxhash

KEY_ID_BYTES = 8


class Seal(NamedTuple):
    """What a header says of its payload: a checksum, or the tag and the salt that it was encrypted with."""

    checksum: bytes
    salt: bytes = b""


NO_SEAL = Seal(b"")
"""Of a header whose payload is not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Integrity(ABC):
    """What the header's two checksums are.

    ``name`` tells algorithms and keys apart and gives no key away. ``key`` is that of header checksums: 32 bytes,
    or none without a key file. ``salt_bytes`` is not 0 where payloads are encrypted.
    """

    algorithm: ClassVar[int]
    payload_checksum_bytes: ClassVar[int]
    salt_bytes: ClassVar[int] = 0
    max_payload_bytes: ClassVar[int] = 1 << 40

    name: str
    key_id: bytes = bytes(KEY_ID_BYTES)
    key: bytes = field(default=b"", repr=False)

    @abstractmethod
    def header_checksum(self, header: bytes) -> bytes:
        """The checksum of a header's bytes before its checksum."""

    @abstractmethod
    def seal(self, segments: Iterable[memoryview]) -> Seal:
        """What proves the payload in these segments. The call leaves them as they belong on the disk: perhaps
        encrypted."""

    @abstractmethod
    def unseal(self, seal: Seal, segments: Iterable[memoryview]) -> bool:
        """Whether the payload in these segments is the one that was sealed so. An encrypted one is decrypted in place,
        each segment before the next one is asked for. Nothing of it may be used unless it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainIntegrity(Integrity):
    """XXH3-128, seed 0, big-endian as XXH prints it."""

    algorithm = 1
    payload_checksum_bytes = 16

    def header_checksum(self, header: bytes) -> bytes:
        return xxhash.xxh3_128_digest(header)

    def seal(self, segments: Iterable[memoryview]) -> Seal:
        digest = xxhash.xxh3_128()
        for segment in segments:
            digest.update(segment)
        return Seal(digest.digest())

    def unseal(self, seal: Seal, segments: Iterable[memoryview]) -> bool:
        return hmac.compare_digest(seal.checksum, self.seal(segments).checksum)


XXH3 = PlainIntegrity(name="xxh3")


def integrity_of(encryption_key_file: str = "") -> Integrity:
    """AES-256-GCM with a key, else XXH3. Called at start; raises ConfigError."""
    if not encryption_key_file:
        return XXH3
    from vllm_overlay.tiers.disk.files import encryption  # who does not encrypt does not need cryptography

    return encryption.EncryptedIntegrity.of(encryption.read_key(encryption_key_file))
