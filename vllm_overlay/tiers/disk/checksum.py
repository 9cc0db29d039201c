# SPDX-License-Identifier: Apache-2.0
"""How a file proves its bytes: by a checksum that finds accidents, or by one that only the owner of a key can make."""

import hmac
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import xxhash
from blake3 import blake3

from vllm_overlay.config import ConfigError

MIN_KEY_BYTES = 32
_MAX_KEY_BYTES = 1 << 16
_KEY_CONTEXT = "vllm-overlay disk tier: key of checksums, version 1"
_NAME_CONTEXT = "vllm-overlay disk tier: name of key, version 1"
_CACHE_CONTEXT = "vllm-overlay disk tier: key of weight digests, version 1"


class Digest(Protocol):
    """Fed piece by piece; ``digest`` says what all pieces one after the other come to."""

    def update(self, data: memoryview | bytes, /) -> object: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Integrity:
    """``algorithm`` and ``num_bytes`` of a header's two checksums. ``name`` tells keys apart and gives none away.

    ``cache_key`` seals the digests of weights that are kept under the root; it has 32 bytes, or none without a key.
    """

    algorithm: int
    num_bytes: int
    name: str
    key: bytes = field(default=b"", repr=False)
    cache_key: bytes = field(default=b"", repr=False)

    def new_digest(self) -> Digest:
        return blake3(key=self.key) if self.key else xxhash.xxh3_128()

    def checksum_of(self, segments: Iterable[memoryview | bytes]) -> bytes:
        """The checksum of the segments one after the other: ``num_bytes`` bytes."""
        digest = self.new_digest()
        for segment in segments:
            digest.update(segment)
        return digest.digest()

    def verify(self, checksum: bytes, segments: Iterable[memoryview | bytes]) -> bool:
        """Whether ``checksum`` is that of the segments. Takes as long for a near miss as for any other."""
        return hmac.compare_digest(checksum, self.checksum_of(segments))


XXH3 = Integrity(algorithm=1, num_bytes=16, name="xxh3")
"""XXH3-128, seed 0, big-endian as XXH prints it."""


def integrity_of(key_file: str) -> Integrity:
    """BLAKE3 keyed with what ``key_file`` holds; XXH3 without one. Called at start; raises ConfigError."""
    if not key_file:
        return XXH3
    secret = _read_key(key_file)
    name = blake3(secret, derive_key_context=_NAME_CONTEXT).hexdigest(8)
    key = blake3(secret, derive_key_context=_KEY_CONTEXT).digest()
    cache_key = blake3(secret, derive_key_context=_CACHE_CONTEXT).digest()
    return Integrity(algorithm=2, num_bytes=32, name=f"blake3:{name}", key=key, cache_key=cache_key)


def _read_key(path: str) -> bytes:
    """The whole file. A link to it is followed: that is how secrets are mounted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            state = os.fstat(fd)
            secret = file.read(_MAX_KEY_BYTES + 1) if stat.S_ISREG(state.st_mode) else b""
    except OSError as error:
        raise ConfigError(
            f"integrity_key_file={path!r} cannot be read ({error.strerror}): create it with "
            f"`(umask 077; head -c {MIN_KEY_BYTES} /dev/urandom > FILE)`"
        ) from error
    if not stat.S_ISREG(state.st_mode):
        raise ConfigError(f"integrity_key_file={path!r} is no regular file: set it to one that holds the key")
    if state.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"integrity_key_file={path!r} belongs to user {state.st_uid}, who knows the key then: make it this user's"
        )
    if stat.S_IMODE(state.st_mode) & 0o077:
        raise ConfigError(
            f"integrity_key_file={path!r} has mode {stat.S_IMODE(state.st_mode):04o}, so others may read or change the "
            "key: set its mode to 0600"
        )
    if not MIN_KEY_BYTES <= len(secret) <= _MAX_KEY_BYTES:
        raise ConfigError(
            f"integrity_key_file={path!r} holds {len(secret) if len(secret) <= _MAX_KEY_BYTES else 'too many'} bytes: "
            f"create it with {MIN_KEY_BYTES} random ones, `(umask 077; head -c {MIN_KEY_BYTES} /dev/urandom > FILE)`"
        )
    return secret
