# SPDX-License-Identifier: Apache-2.0
"""What ``namespace.json`` says, read with the distrust that files deserve. For tools: what serves does not read it."""

import json
import os
import stat
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.tiers.disk.namespace import DESCRIPTION, FINGERPRINT, INTEGRITY

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Words:
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


def read_words(directory: str) -> Words:
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
    return Words(
        attention if isinstance(attention, str) and FINGERPRINT.fullmatch(attention) else "",
        description if isinstance(description, dict) else {},
    )


def words_or_none(directory: str) -> Words:
    """The same, without words where there are none."""
    try:
        return read_words(directory)
    except (OSError, ValueError):
        return Words()
