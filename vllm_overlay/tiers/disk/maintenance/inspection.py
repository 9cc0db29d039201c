# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats --verify``: reads every object under a root with the code that loads it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_overlay.common.reasons import Reason
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.namespace import parse_file_name
from vllm_overlay.tiers.disk.files.object_file import BadObject, read_header, read_object
from vllm_overlay.tiers.disk.files.scan import FoundFile, namespaces_under, scan_objects
from vllm_overlay.tiers.memory import HostPool, unit_size, units_needed

MOST_BYTES = 8 << 30
"""A file is read into memory as a whole. A larger one is left to the server that stored it."""


@dataclass(slots=True)
class Problem:
    """``path`` is relative to the root, ``why`` a reason as metrics have it. ``is_bad``: it was read, and is wrong."""

    path: str
    why: str
    is_bad: bool
    is_removed: bool = False


@dataclass(slots=True)
class Inspection:
    """Files and bytes that verify, and what does not.

    ``unverified`` are namespaces that need another key, with the key's name. It is empty where nobody says what they
    need.
    """

    num_files: int = 0
    num_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    unverified: dict[str, str] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, or nothing is any more."""
        return all(problem.is_removed for problem in self.problems)


class Inspector:
    """One run over one root, which others may serve meanwhile. It changes nothing but what ``remove`` unlinks.

    ``on_bytes(done, total)`` hears how far it is. A row whose file is unlinked stays: the next load finds it missing.
    """

    def __init__(
        self,
        root: str,
        integrity: Integrity,
        remove: bool = False,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
        device: Device | None = None,
    ) -> None:
        self._root = root
        self._known = {each.name: each for each in (integrity, XXH3)}
        self._remove = remove
        self._on_bytes = on_bytes
        self._device = device or Device()
        self._found = Inspection()

    def run(self) -> Inspection:
        """Raises OSError when the root cannot be read."""
        files = list(self._files())
        total = sum(file.num_bytes for _, file, _ in files)
        done = 0
        for fingerprint, file, integrity in files:
            self._look_at(fingerprint, file, integrity)
            done += file.num_bytes
            self._on_bytes(done, total)
        return self._found

    def _files(self) -> Iterator[tuple[str, FoundFile, Integrity]]:
        for fingerprint in namespaces_under(self._root, is_strict=True):
            needed = manifest_or_empty(os.path.join(self._root, fingerprint)).integrity
            if (integrity := self._known.get(needed)) is None:
                self._found.unverified[fingerprint] = needed
                continue
            yield from ((fingerprint, file, integrity) for file in scan_objects(self._root, fingerprint))

    def _look_at(self, fingerprint: str, file: FoundFile, integrity: Integrity) -> None:
        try:
            self._read(fingerprint, file, integrity)
        except BadObject as bad:
            if bad.reason is not Reason.MISSING:  # it was evicted meanwhile
                self._add_problem(file, bad)
        else:
            self._found.num_files += 1
            self._found.num_bytes += file.num_bytes

    def _read(self, fingerprint: str, file: FoundFile, integrity: Integrity) -> None:
        """Raises BadObject."""
        header = read_header(self._device, file.path, integrity)
        if (header.fingerprint.hex(), (header.object_id, header.rank)) != (fingerprint, parse_file_name(file.name)):
            raise BadObject(Reason.HEADER)
        if header.payload_bytes > MOST_BYTES:
            raise BadObject(Reason.TOO_LARGE, is_bad=False)
        unit_bytes = unit_size(header.payload_bytes)
        units = range(units_needed(header.payload_bytes, unit_bytes))
        buffer = HostPool(len(units), unit_bytes).buffer(tuple(units), header.payload_bytes)
        read_object(self._device, file.path, header.identity, buffer, direct=False, integrity=integrity)

    def _add_problem(self, file: FoundFile, bad: BadObject) -> None:
        problem = Problem(os.path.relpath(file.path, self._root), bad.reason.value, bad.is_bad)
        if self._remove and bad.is_bad:
            with contextlib.suppress(OSError):
                if self._is_as_found(file):
                    self._device.unlink(file.path)
                    problem.is_removed = True
        self._found.problems.append(problem)

    def _is_as_found(self, file: FoundFile) -> bool:
        """Whether it was neither evicted nor stored again meanwhile."""
        found = self._device.lstat(file.path)
        return (found.st_ino, found.st_mtime) == (file.inode, file.mtime)
