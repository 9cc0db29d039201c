# SPDX-License-Identifier: Apache-2.0
"""``namespace.json``: for people and tools, read with the distrust that files deserve."""

import json
import logging
import os
import stat
import time
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.tiers.disk.files.device import Device, make_directory, replace_file
from vllm_overlay.tiers.disk.files.marker import require_marker
from vllm_overlay.tiers.disk.files.namespace import (
    DESCRIPTION,
    FINGERPRINT,
    INTEGRITY,
    RESET,
    DiskNamespace,
)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_MAX_BYTES = 1 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """``attention`` is the namespace that a snapshot's parents lie in. Empty when the file does not say."""

    attention: str = ""
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return str(self.description.get("model", ""))

    @property
    def integrity(self) -> str:
        """What the checksums need; empty when the file does not say."""
        return str(self.description.get(INTEGRITY, ""))

    @property
    def is_of_one_process(self) -> bool:
        """Whether the namespace was made by a reset: when its process is gone, nobody finds it again."""
        return bool(self.description.get(RESET))


def read_manifest(directory: str) -> Manifest:
    """Reads the words of one namespace's directory. Raises OSError, or ValueError for anything but our JSON."""
    fd = os.open(os.path.join(directory, DESCRIPTION), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    try:
        words = json.loads(raw)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(words, dict):
        raise ValueError("it is not an object")
    attention, description = words.get("attention"), words.get("description")
    return Manifest(
        attention if isinstance(attention, str) and FINGERPRINT.fullmatch(attention) else "",
        description if isinstance(description, dict) else {},
    )


def manifest_or_empty(directory: str) -> Manifest:
    """As ``read_manifest``, but without words where there are none."""
    try:
        return read_manifest(directory)
    except (OSError, ValueError):
        return Manifest()


def write_manifest(device: Device, directory: str, namespace: DiskNamespace, fingerprint: str) -> bool:
    """Returns whether it was written. A namespace works without it. Called by the process that serves it."""
    words = {
        "fingerprint": fingerprint,
        "attention": namespace.attention,
        "snapshot": namespace.snapshot,
        "description": namespace.description,
    }
    try:
        replace_file(device, os.path.join(directory, DESCRIPTION), json.dumps(words, indent=2, default=str).encode())
    except OSError as error:
        logger.warning("disk tier: %s has no namespace.json: %s", directory, error)
        return False
    return True


class Manifests:
    """Writes ``namespace.json`` of the served namespace: once, and again where it is missing. Called in one thread."""

    def __init__(self, root: str, device: Device) -> None:
        self._root = root
        self._device = device
        self._described: set[str] = set()
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def describe(self, namespace: DiskNamespace, is_last: bool = False) -> None:
        """Called at each turn. After a failure it pauses, but not when ``is_last``. Nobody who serves waits for it."""
        if not (is_last or self._pauses.may_try(time.monotonic())):
            return
        written = [self._write(namespace, each) for each in self._undescribed(namespace)]
        if written:
            (self._pauses.succeeded if all(written) else self._pauses.failed)(time.monotonic())

    def _undescribed(self, namespace: DiskNamespace) -> list[str]:
        """The fingerprints of which this process has not said what they are, or whose file is gone."""
        return [
            fingerprint
            for fingerprint in namespace.fingerprints
            if fingerprint not in self._described
            or not os.path.lexists(os.path.join(self._root, fingerprint, DESCRIPTION))
        ]

    def _write(self, namespace: DiskNamespace, fingerprint: str) -> bool:
        directory = os.path.join(self._root, fingerprint)
        try:
            require_marker(self._root)
            make_directory(self._device, directory)
        except OSError as error:
            logger.warning("disk tier: %s cannot be made: %s", directory, error)
            is_written = False
        else:
            is_written = write_manifest(self._device, directory, namespace, fingerprint)
        (self._described.add if is_written else self._described.discard)(fingerprint)
        return is_written
