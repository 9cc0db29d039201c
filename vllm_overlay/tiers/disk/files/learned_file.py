# SPDX-License-Identifier: Apache-2.0
"""``learned.json``: what an eviction policy has learned of a namespace, kept over a restart."""

import logging
import os
import stat

import msgspec

from vllm_overlay import versions
from vllm_overlay.common.ownership import why_not_ours
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.files.device import Device, replace_file
from vllm_overlay.tiers.disk.files.namespace import LEARNED
from vllm_overlay.tiers.policies.reuse import Learned

_MAX_BYTES = 1 << 14
_log = RateLimitedLog(logging.getLogger(__name__))


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    learned: Learned


def check_learned(root: str, directory: str) -> Learned | None:
    """What the file of a namespace's directory says; None without a file.

    Raises OSError, and ValueError for anything but numbers that this version can use, written by who may serve.
    """
    try:
        fd = os.open(os.path.join(directory, LEARNED), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a regular file")
        if why := why_not_ours(state):
            raise ValueError(f"it {why}")
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    words = msgspec.json.decode(raw, type=_Words)
    if words.version != versions.LEARNED or not words.learned.fits():
        raise ValueError("it is of another version, or of other roles, ages or properties")
    return words.learned


def read_learned(root: str, attention: str) -> Learned | None:
    """What is known at the start of the namespace with that attention fingerprint; None: nothing. Called at start."""
    directory = os.path.join(root, attention)
    try:
        return check_learned(root, directory)
    except (OSError, ValueError) as error:
        _log.warning(
            directory, "disk tier: %s of %s is not used, eviction learns from the start: %s", LEARNED, directory, error
        )
        return None


def write_learned(device: Device, root: str, attention: str, learned: Learned) -> None:
    """Keep it for the next start. Called in the bookkeeper's thread. What cannot be written is logged and lost."""
    directory = os.path.join(root, attention)
    try:
        words = msgspec.json.encode(_Words(versions.LEARNED, learned))
        replace_file(device, os.path.join(directory, LEARNED), words)
    except OSError as error:
        _log.warning("write", "disk tier: %s has no new %s: %s", directory, LEARNED, error)
