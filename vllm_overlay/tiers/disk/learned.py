# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy has learned of a namespace, kept in the catalogue over a restart."""

import contextlib
import logging

import msgspec

from vllm_overlay import versions
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import Catalogue, CatalogueError
from vllm_overlay.tiers.disk.files.root import Root
from vllm_overlay.tiers.policies.reuse import Learned

logger = logging.getLogger(__name__)


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    learned: Learned


def encode_learned(learned: Learned) -> bytes:
    return msgspec.json.encode(_Words(versions.LEARNED, learned))


def decode_learned(raw: bytes) -> Learned:
    """Raises ValueError for anything but numbers that this version can use."""
    words = msgspec.json.decode(raw, type=_Words)
    if words.version != versions.LEARNED or not words.learned.fits():
        raise ValueError("it is of another version, or of other roles, ages or properties")
    return words.learned


def read_learned(root: Root, fingerprint: str) -> Learned | None:
    """What is known at the start of a namespace; None: nothing. Called at start."""
    try:
        with contextlib.closing(Catalogue(root.path, root.journal)) as catalogue:
            raw = catalogue.learned(fingerprint)
        return None if raw is None else decode_learned(raw)
    except (CatalogueError, ConfigError, OSError, ValueError) as error:
        logger.warning("disk tier: what eviction has learned under %s is not used: %s", root.path, error)
        return None
