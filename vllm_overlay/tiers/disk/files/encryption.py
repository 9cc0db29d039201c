# SPDX-License-Identifier: Apache-2.0
"""AES-256-GCM over an object's bytes where they lie, each object under a key of its own; and the file of the secret."""

import os
import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING

from blake3 import blake3

from vllm_overlay.config import ConfigError

if TYPE_CHECKING:  # imported where it is used: who does not encrypt does not need it
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

SALT_BYTES = 32
TAG_BYTES = 16
MAX_BYTES = (1 << 36) - 32
"""GCM's limit of one message."""

MIN_KEY_BYTES = 32
_MAX_KEY_BYTES = 1 << 16
"""Of the file."""
_OF_A_USER, _OF_ROOT = 0o077, 0o037
"""Bits that a key's mode must not have. Who can read what root owns by its group is for root to say, and a container
without root reads its secrets so."""
_KEY_BYTES, _NONCE_BYTES = 32, 12


def _cipher(key: bytes, salt: bytes) -> "Cipher[GCM]":
    """The cipher of one object. A random salt comes once, so no key and nonce ever meet two messages."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    derived = blake3(salt, key=key).digest(length=_KEY_BYTES + _NONCE_BYTES)
    return Cipher(AES256(derived[:_KEY_BYTES]), GCM(derived[_KEY_BYTES:]))


def encrypt(key: bytes, salt: bytes, segments: Iterable[memoryview]) -> bytes:
    """Encrypt the segments in place; returns the tag of all of them. ``salt`` must be fresh random bytes."""
    encryptor = _cipher(key, salt).encryptor()
    for segment in segments:
        encryptor.update_into(segment, segment)
    encryptor.finalize()
    return encryptor.tag


def decrypt(key: bytes, salt: bytes, segments: Iterable[memoryview], tag: bytes) -> bool:
    """Decrypt the segments in place; returns whether that is the tag of all of them. If not, nothing of them may be
    used."""
    from cryptography.exceptions import InvalidTag

    decryptor = _cipher(key, salt).decryptor()
    for segment in segments:
        decryptor.update_into(segment, segment)
    try:
        decryptor.finalize_with_tag(tag)
    except InvalidTag:
        return False
    return True


def read_key(path: str) -> bytes:
    """All bytes of the file that ``encryption_key_file`` names. A link is followed: secrets are mounted that way.

    It is refused when others may know or change it. Called by ``integrity_of``, at start. Raises ConfigError, which
    names the setting.
    """
    said = f"encryption_key_file={path!r}"
    command = f"`(umask 077; head -c {MIN_KEY_BYTES} /dev/urandom > FILE)`"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            state = os.fstat(fd)
            secret = file.read(_MAX_KEY_BYTES + 1) if stat.S_ISREG(state.st_mode) else b""
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
    if not MIN_KEY_BYTES <= len(secret) <= _MAX_KEY_BYTES:
        held = len(secret) if len(secret) <= _MAX_KEY_BYTES else "too many"
        raise ConfigError(f"{said} holds {held} bytes: create it with {MIN_KEY_BYTES} random ones, {command}")
    return secret
