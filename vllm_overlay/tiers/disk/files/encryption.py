# SPDX-License-Identifier: Apache-2.0
"""AES-256-GCM over an object's bytes where they lie, each object under a key of its own."""

from collections.abc import Iterable

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

SALT_BYTES = 32
TAG_BYTES = 16
MAX_BYTES = (1 << 36) - 32
"""GCM's limit of one message."""

_KEY_BYTES, _NONCE_BYTES = 32, 12


def _cipher(key: bytes, salt: bytes) -> Cipher[GCM]:
    """The cipher of one object. A random salt comes once, so no key and nonce ever meet two messages."""
    derived = blake3(salt, key=key).digest(length=_KEY_BYTES + _NONCE_BYTES)
    return Cipher(AES256(derived[:_KEY_BYTES]), GCM(derived[_KEY_BYTES:]))


def encrypt(key: bytes, salt: bytes, segments: Iterable[memoryview]) -> bytes:
    """Encrypt the segments in place; returns the tag of all of them. ``salt`` must be fresh random bytes."""
    encryptor = _cipher(key, salt).encryptor()
    for segment in segments:
        encryptor.update_into(segment, segment)
    encryptor.finalize()
    return encryptor.tag


class Decryption:
    """Decrypts what it is fed in place. Nothing of that may be used before ``verify`` says that all of it is right."""

    def __init__(self, key: bytes, salt: bytes) -> None:
        self._decryptor = _cipher(key, salt).decryptor()

    def update(self, segment: memoryview) -> None:
        self._decryptor.update_into(segment, segment)

    def verify(self, tag: bytes) -> bool:
        """Whether that is the tag of all that was fed. Called once, at the end."""
        try:
            self._decryptor.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True
