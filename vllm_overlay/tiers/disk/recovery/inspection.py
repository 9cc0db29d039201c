# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats``: what the catalogue of a root knows, and with ``--verify`` whether its objects are right."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.common.reasons import Reason
from vllm_overlay.config import ConfigError
from vllm_overlay.planner.objects import ObjectId, ObjectKind
from vllm_overlay.tiers.disk.catalogue import Catalogue, NamespaceUsage, StoredObject
from vllm_overlay.tiers.disk.catalogue.generations import newest
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import Identity, file_bytes
from vllm_overlay.tiers.disk.files.mounts import journal_of
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY
from vllm_overlay.tiers.disk.files.object_file import BadObject, read_object
from vllm_overlay.tiers.disk.files.writer import path_of
from vllm_overlay.tiers.memory import HostPool, unit_size, units_needed

MOST_BYTES = 8 << 30
"""A file is read into memory as a whole. A larger one is left to the server that stored it."""


def open_existing(root: str) -> Catalogue:
    """The catalogue of a root. Makes none. Raises CatalogueError, OSError, and ConfigError where there is none."""
    if not newest(root):
        raise ConfigError(f"{root} has no catalogue, so nobody knows what its files are: start a server with this root")
    return Catalogue(root, journal_of(root))


def description_of(usage: NamespaceUsage) -> dict[str, Any]:
    """What a namespace is, in words. Empty where nobody has said so since the catalogue was lost."""
    with contextlib.suppress(ValueError, RecursionError):
        words = json.loads(usage.words or "{}")
        if isinstance(words, dict):
            return words
    return {}


def kind_name(kind: str) -> str:
    """A kind in words."""
    if kind.startswith(ObjectKind.SNAPSHOT):
        return f"snapshots ({kind[1:]})"
    object_id = ObjectId(kind, b"")
    group = "full attention" if object_id.kind is ObjectKind.FULL_ATTENTION else "sliding window"
    return f"chunks of {group} group {object_id.group_index}"


@dataclass(slots=True)
class Problem:
    """``path`` is relative to the root, ``why`` a reason as metrics have it. ``is_bad``: it was read, and is wrong."""

    path: str
    why: str
    is_bad: bool
    is_removed: bool = False


@dataclass(slots=True)
class Inspection:
    """Files and bytes that verify, and what does not. ``num_missing`` files are gone: their next load is a miss.

    ``unverified`` are namespaces that need another key, with the key's name. It is empty where nobody says what they
    need.
    """

    num_files: int = 0
    num_bytes: int = 0
    num_missing: int = 0
    problems: list[Problem] = field(default_factory=list)
    unverified: dict[str, str] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, or nothing is any more."""
        return all(problem.is_removed for problem in self.problems)


@dataclass(slots=True)
class Inspector:
    """One run over one root, which others may serve meanwhile. It changes nothing but what ``remove`` unlinks.

    ``on_bytes(done, total)`` hears how far it is. A row whose file is unlinked stays: the next load finds it missing,
    and stores it anew.
    """

    root: str
    catalogue: Catalogue
    integrity: Integrity
    remove: bool = False
    on_bytes: Callable[[int, int], None] = lambda done, total: None
    device: Device = field(default_factory=Device)
    _found: Inspection = field(default_factory=Inspection, init=False)

    def run(self) -> Inspection:
        """Raises CatalogueError."""
        known = {each.name: each for each in (self.integrity, XXH3)}
        needed = {usage.fingerprint: str(description_of(usage).get(INTEGRITY, "")) for usage in self.catalogue.usage()}
        total, done = self.catalogue.totals().object_bytes, 0
        for item in itertools.chain.from_iterable(self.catalogue.load_all()):
            key = needed.get(item.fingerprint, "")
            if (integrity := known.get(key)) is None:
                self._found.unverified[item.fingerprint] = key
            else:
                for rank in range(item.world_size):
                    self._look_at(item, rank, integrity)
            done += item.num_bytes
            self.on_bytes(done, total)
        return self._found

    def _look_at(self, item: StoredObject, rank: int, integrity: Integrity) -> None:
        path = path_of(self.root, item.file, rank)
        try:
            self._read(item, rank, path, integrity)
        except BadObject as bad:
            if not self.catalogue.named([item.file]):
                return  # it was evicted meanwhile
            if bad.reason is Reason.MISSING:
                self._found.num_missing += 1
                return
            problem = Problem(os.path.relpath(path, self.root), bad.reason.value, bad.is_bad)
            if self.remove and bad.is_bad:
                with contextlib.suppress(FileNotFoundError):
                    self.device.unlink(path)
                problem.is_removed = True
            self._found.problems.append(problem)
        else:
            self._found.num_files += 1
            self._found.num_bytes += file_bytes(item.planned.num_bytes)

    def _read(self, item: StoredObject, rank: int, path: str, integrity: Integrity) -> None:
        """Raises BadObject."""
        payload_bytes = item.planned.num_bytes
        if payload_bytes > MOST_BYTES:
            raise BadObject(Reason.TOO_LARGE, is_bad=False)
        unit_bytes = unit_size(payload_bytes)
        units = range(units_needed(payload_bytes, unit_bytes))
        buffer = HostPool(len(units), unit_bytes).buffer(tuple(units), payload_bytes)
        fingerprint = bytes.fromhex(item.fingerprint)
        identity = Identity(fingerprint, item.object_id, item.file, rank, item.world_size, payload_bytes)
        read_object(self.device, path, identity, buffer, direct=False, integrity=integrity)
