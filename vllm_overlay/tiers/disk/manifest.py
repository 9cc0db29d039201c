# SPDX-License-Identifier: Apache-2.0
"""``namespace.json``: for people and tools, read with the distrust that files deserve."""

import json
import logging
import os
import stat
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay import versions
from vllm_overlay.tiers.disk.device import Device, remove_quietly, temporary_name, write_all
from vllm_overlay.tiers.disk.namespace import DESCRIPTION, FINGERPRINT, INTEGRITY, OBJECT_FORMAT, RESET, DiskNamespace

_MAX_BYTES = 1 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """``attention`` is the namespace that a snapshot's parents lie in, empty when the file does not say."""

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
    def object_format(self) -> int:
        """The version of the objects' files; ours when the file does not say what version 1 said."""
        said = self.description.get(OBJECT_FORMAT, 1 if INTEGRITY in self.description else versions.DISK_OBJECT)
        return said if isinstance(said, int) else versions.DISK_OBJECT

    @property
    def is_of_one_process(self) -> bool:
        """Whether the namespace was made by a reset: when its process is gone, nobody finds it again."""
        return bool(self.description.get(RESET))


def read_manifest(directory: str) -> Manifest:
    """The words of one namespace's directory. Raises OSError or ValueError, the latter for anything but our JSON."""
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
    """The same, without words where there are none."""
    try:
        return read_manifest(directory)
    except (OSError, ValueError):
        return Manifest()


def write_manifest(device: Device, directory: str, namespace: DiskNamespace, fingerprint: str) -> bool:
    """Whether it was written: a namespace without it works. Called by what serves."""
    temporary = os.path.join(directory, temporary_name())
    words = {
        "fingerprint": fingerprint,
        "attention": namespace.attention,
        "snapshot": namespace.snapshot,
        "description": namespace.description,
    }
    try:
        fd = device.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(device, fd, [memoryview(json.dumps(words, indent=2, default=str).encode())])
        finally:
            device.close(fd)
        device.rename(temporary, os.path.join(directory, DESCRIPTION))
    except OSError as error:
        remove_quietly(device, temporary)
        logger.warning("disk tier: %s has no namespace.json: %s", directory, error)
        return False
    return True
