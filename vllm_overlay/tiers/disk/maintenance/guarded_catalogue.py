# SPDX-License-Identifier: Apache-2.0
"""The catalogue as ``fsck`` uses it. What is wrong with it is a finding, and ends no run."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import (
    Catalogue,
    CatalogueError,
    Damaged,
    Name,
    Namespace,
    NamespaceUsage,
    StoredObject,
    replace_damaged,
)
from vllm_overlay.tiers.disk.files.checksum import Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.namespace import parse_file_name
from vllm_overlay.tiers.disk.files.root import lock_directory
from vllm_overlay.tiers.disk.maintenance.catalogue_access import (
    count_members,
    joined,
    open_existing,
    without_interruption,
)
from vllm_overlay.tiers.disk.maintenance.completion import complete, missing_keys
from vllm_overlay.tiers.disk.maintenance.remover import Remover

_ANY_CAPACITY = 1 << 53
_Answer = TypeVar("_Answer")


class GuardedCatalogue:
    """One for each run of ``fsck``: a context in which the catalogue is open.

    No method raises for what is wrong with the catalogue. The first ``error`` is kept, and nothing more is asked then.
    Methods that change something are for a run that may ``repair``.
    """

    def __init__(self, root: str, device: Device, repair: bool) -> None:
        self._root = root
        self._device = device
        self._repair = repair
        self._catalogue: Catalogue | None = None
        self._remover: Remover | None = None
        self._open = contextlib.ExitStack()
        self._usages: dict[str, NamespaceUsage] = {}
        self._is_anybody_there = False
        self.of_dead: frozenset[str] = frozenset()
        """Namespaces in which processes that have ended may have left files."""
        self.error: CatalogueError | ConfigError | None = None
        self.num_removed = 0
        """Objects that ``remove`` has removed."""

    def __enter__(self) -> "GuardedCatalogue":
        try:
            self._catalogue = open_existing(self._root)
            if self._catalogue is not None and self._repair:
                self._remover = self._open.enter_context(joined(self._catalogue, self._root, self._device))
            elif self._catalogue is not None:
                self._open.enter_context(contextlib.closing(self._catalogue))
        except (CatalogueError, ConfigError) as error:
            self._fail(error)
        self.look_who_serves()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def is_open(self) -> bool:
        """False where there is no catalogue, and after an error."""
        return self._catalogue is not None

    def ask(self, question: Callable[[Catalogue], _Answer]) -> _Answer | None:
        """The answer to ``question``, or None where the catalogue has none. It may be asked twice, so it must do
        nothing that may be done only once."""
        if (catalogue := self._catalogue) is None:
            return None
        try:
            return without_interruption(lambda: question(catalogue))
        except CatalogueError as error:
            self._fail(error)
            return None

    # Who serves.

    def look_who_serves(self) -> None:
        """Learn again who serves what, for ``is_served``. Servers start and end while we read."""
        usages = self.ask(Catalogue.usage) or ()
        self._usages = {usage.fingerprint: usage for usage in usages}
        dead = self.ask(Catalogue.dead_members) or ()
        self.of_dead = frozenset(fingerprint for member in dead for fingerprint in member.fingerprints)
        try:
            self._is_anybody_there = count_members(self._root) > 0
        except CatalogueError:
            self._is_anybody_there = True

    def is_served(self, fingerprint: str) -> bool:
        """Whether files of the namespace may be on their way. Without a catalogue, whoever is there may serve it."""
        if not self.is_open:
            return self._is_anybody_there
        usage = self._usages.get(fingerprint)
        return usage is not None and usage.is_served

    # Repairs.

    def remove(self, names: Sequence[Name]) -> bool:
        """Remove objects and what is on top of them, their rows and files. Returns whether no such row is left."""
        if (remover := self._remover) is not None:
            self.num_removed += self.ask(lambda _: remover.remove(names)) or 0
        return self.is_open and not self.ask(lambda catalogue: catalogue.find(names)) and self.is_open

    def remove_object_of(self, fingerprint: str, path: str) -> bool:
        """Remove a file; first, so that nobody looks for it, the object of which it is a part. May raise OSError."""
        parsed = parse_file_name(os.path.basename(path))
        if parsed is not None and self.is_open:
            self.remove([Name(fingerprint, parsed[0])])
        return self.remove_file(path)

    def remove_file(self, path: str) -> bool:
        """Remove a file that no row is about; True. May raise OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._device.unlink(path)
        return True

    def adopt(self, item: StoredObject) -> bool:
        """Whether the catalogue has the object of these files now."""
        return bool(self.ask(lambda catalogue: self._adopt(catalogue, item)))

    def _adopt(self, catalogue: Catalogue, item: StoredObject) -> bool:
        if item.fingerprint not in self._usages:
            manifest = manifest_or_empty(os.path.join(self._root, item.fingerprint))
            partner = manifest.attention or item.fingerprint
            found = Namespace(item.fingerprint, partner, is_temporary=manifest.is_of_one_process)
            catalogue.tell_of([found], int(time.time()))
        granted = catalogue.grant(item.num_bytes, item.num_bytes, _ANY_CAPACITY).num_bytes
        refused = catalogue.commit([item]).refused
        if refused:
            catalogue.give_back(granted)
        return not refused

    def replace(self, generation: int, integrity: Integrity) -> bool:
        """Put a new catalogue in the place of a damaged one, and tell it of all files."""
        self._close()
        try:
            replace_damaged(lock_directory(self._root), generation)
            if not missing_keys(self._root, integrity):  # else a server tells it
                catalogue = Catalogue(lock_directory(self._root))
                with joined(catalogue, self._root, self._device):
                    complete(catalogue, self._root, self._device, integrity)
        except (CatalogueError, ConfigError):
            return False
        return True

    def _fail(self, error: CatalogueError | ConfigError) -> None:
        self.error = self.error or error
        self._close()

    def _close(self) -> None:
        self._catalogue = self._remover = None
        with contextlib.suppress(CatalogueError):
            self._open.close()


def generation_of(error: object) -> int | None:
    """The number of a catalogue that a new one may replace; None where that would not help."""
    return error.generation if isinstance(error, Damaged) else None
