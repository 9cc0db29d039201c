# SPDX-License-Identifier: Apache-2.0
"""AES-256-GCM over an object's bytes where they lie, each object under a key of its own; and the file with the secret.

Imported by ``integrity_of`` for who encrypts: it needs ``cryptography``.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.checksum import KEY_ID_BYTES, Integrity, Seal

_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 32, 1 << 16
"""Of the file that ``encryption_key_file`` names."""
_OF_A_USER, _OF_ROOT = 0o077, 0o037
"""Bits that a key's mode must not have. Who can read what root owns by its group is for root to say, and a container
without root reads its secrets so."""
_KEY_BYTES, _NONCE_BYTES = 32, 12
_CONTEXT = "vllm-overlay disk tier: "
_ENCRYPTED_HEADER_CONTEXT = f"{_CONTEXT}key of header checksums of encrypted objects, version 1"
_ENCRYPTION_CONTEXT = f"{_CONTEXT}key of object keys, version 1"
_ENCRYPTION_NAME_CONTEXT = f"{_CONTEXT}name of encryption key, version 1"


def _derive(secret: bytes, context: str) -> bytes:
    return blake3(secret, derive_key_context=context).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptedIntegrity(Integrity):
    """AES-256-GCM for payloads, with a key for each object. The header names salt and tag, and keyed BLAKE3 proves the
    header."""

    algorithm = 2
    payload_checksum_bytes = 16
    salt_bytes = 32
    max_payload_bytes = (1 << 36) - 32  # GCM's limit of one message

    encryption_key: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> "EncryptedIntegrity":
        """Made with the keys that an encryption key file of these bytes stands for."""
        key_id = _derive(secret, _ENCRYPTION_NAME_CONTEXT)[:KEY_ID_BYTES]
        return cls(
            name=f"aes-256-gcm:{key_id.hex()}",
            key_id=key_id,
            key=_derive(secret, _ENCRYPTED_HEADER_CONTEXT),
            encryption_key=_derive(secret, _ENCRYPTION_CONTEXT),
        )

    def header_checksum(self, header: bytes) -> bytes:
        return blake3(header, key=self.key).digest()

    def _cipher(self, salt: bytes) -> Cipher[GCM]:
        """The cipher of one object. A random salt comes once, so no key and nonce ever meet two messages."""
        derived = blake3(salt, key=self.encryption_key).digest(length=_KEY_BYTES + _NONCE_BYTES)
        return Cipher(AES256(derived[:_KEY_BYTES]), GCM(derived[_KEY_BYTES:]))

    def seal(self, segments: Iterable[memoryview]) -> Seal:
        salt = os.urandom(self.salt_bytes)
        encryptor = self._cipher(salt).encryptor()
        for segment in segments:
            encryptor.update_into(segment, segment)
        encryptor.finalize()
        return Seal(encryptor.tag, salt)

    def unseal(self, seal: Seal, segments: Iterable[memoryview]) -> bool:
        decryptor = self._cipher(seal.salt).decryptor()
        for segment in segments:
            decryptor.update_into(segment, segment)
        try:
            decryptor.finalize_with_tag(seal.checksum)
        except InvalidTag:
            return False
        return True


def read_key(path: str) -> bytes:
    """All bytes of the file that ``encryption_key_file`` names. A link is followed: secrets are mounted that way.

    It is refused when others may know or change it. Called by ``integrity_of``, at start. Raises ConfigError, which
    names the setting.
    """
    said = f"encryption_key_file={path!r}"
    command = f"`(umask 077; head -c {_MIN_SECRET_BYTES} /dev/urandom > FILE)`"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            state = os.fstat(fd)
            secret = file.read(_MAX_SECRET_BYTES + 1) if stat.S_ISREG(state.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"{said} cannot be read ({error.strerror}): create it with {command}") from error
    if not stat.S_ISREG(state.st_mode):
        raise ConfigError(f"{said} is no regular file: set it to one that holds the key")
    if state.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{said} belongs to user {state.st_uid}, who can read the key: make this user its owner")
    if state.st_mode & (_OF_A_USER if state.st_uid else _OF_ROOT):
        raise ConfigError(
            f"{said} has mode {stat.S_IMODE(state.st_mode):04o}, so others may read or change the key: set its mode "
            "to 0600, or to 0440 where root owns it (defaultMode of a secret in Kubernetes)"
        )
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        held = len(secret) if len(secret) <= _MAX_SECRET_BYTES else "too many"
        raise ConfigError(f"{said} holds {held} bytes: create it with {_MIN_SECRET_BYTES} random ones, {command}")
    return secret
