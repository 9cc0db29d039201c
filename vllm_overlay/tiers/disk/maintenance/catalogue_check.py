# SPDX-License-Identifier: Apache-2.0
"""Whether the catalogue agrees with itself and with the files that were found."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.tiers.disk.catalogue import Catalogue, CatalogueError, Name, StoredObject, Superseded
from vllm_overlay.tiers.disk.catalogue.generations import path_of
from vllm_overlay.tiers.disk.files.checksum import Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.namespace import object_path
from vllm_overlay.tiers.disk.files.root import lock_directory
from vllm_overlay.tiers.disk.maintenance.findings import Findings, What
from vllm_overlay.tiers.disk.maintenance.guarded_catalogue import GuardedCatalogue, generation_of
from vllm_overlay.tiers.disk.maintenance.object_check import CheckedNamespace
from vllm_overlay.tiers.disk.maintenance.rebuild import as_stored

_CATALOGUE = "catalogue"
"""Stands for the file where there is none."""


@dataclass(slots=True)
class _Differences:
    """What does not agree: rows that lack a file, rows of other bytes than their files, and objects without a row.

    The objects are whole and can be reached. They come parents first.
    """

    missing: list[StoredObject] = field(default_factory=list)
    different: list[tuple[StoredObject, StoredObject]] = field(default_factory=list)
    unknown: list[StoredObject] = field(default_factory=list)


class CatalogueCheck:
    """The last step of ``fsck``, after all files were read: what came or went meanwhile is looked at again."""

    def __init__(self, findings: Findings, catalogue: GuardedCatalogue, device: Device, integrity: Integrity) -> None:
        self._findings = findings
        self._catalogue = catalogue
        self._device = device
        self._integrity = integrity
        self._is_replaced: bool | None = None
        self._is_removing = False

    def run(self, namespaces: Sequence[CheckedNamespace]) -> None:
        if not self._catalogue.is_open and self._catalogue.error is None:
            if namespaces:
                self._findings.note(_CATALOGUE, What.CATALOGUE, "missing: the next server makes it from the files")
            return
        generation = self._catalogue.ask(lambda catalogue: catalogue.generation) or 0
        path = self._path_of(generation)
        totals = self._catalogue.ask(Catalogue.totals)
        sentences = self._catalogue.ask(Catalogue.check) or ()
        for sentence in sentences:
            self._findings.problem(path, What.CATALOGUE, sentence, lambda: self._replace(generation))
        if totals is not None and not totals.is_complete:
            self._findings.note(path, What.CATALOGUE, "it does not know all files yet: a server tells it")
        elif not sentences:
            self._compare(namespaces)
        self._report_error()

    def _path_of(self, generation: int) -> str:
        return path_of(lock_directory(self._findings.root), generation) if generation else _CATALOGUE

    def _report_error(self) -> None:
        error = self._catalogue.error
        if error is None:
            return
        generation = generation_of(error)
        if generation is not None:
            path, detail = self._path_of(generation), f"it is damaged: {error}"
            self._findings.problem(path, What.CATALOGUE, detail, lambda: self._replace(generation))
        elif isinstance(error, Superseded):
            self._findings.note(_CATALOGUE, What.CATALOGUE, f"another one took its place meanwhile: {error}")
        elif isinstance(error, CatalogueError) or os.stat(self._findings.root).st_uid == os.geteuid():
            self._findings.problem(_CATALOGUE, What.CATALOGUE, f"it cannot be read now: {error}")
        else:
            self._findings.note(_CATALOGUE, What.CATALOGUE, f"not looked at: {error}")

    def _replace(self, generation: int) -> bool:
        """Reports it once, however many sentences there are."""
        if self._is_replaced is None:
            self._is_replaced = self._catalogue.replace(generation, self._integrity)
        return self._is_replaced

    # Rows and files.

    def _compare(self, namespaces: Sequence[CheckedNamespace]) -> None:
        found = self._catalogue.ask(lambda catalogue: self._differences(catalogue, namespaces))
        if found is None:
            return
        self._catalogue.look_who_serves()
        for row in found.missing:
            self._report_missing(row)
        for row, item in found.different:
            self._report_different(row, item)
        for item in found.unknown:
            self._report_unknown(item)

    def _report_missing(self, row: StoredObject) -> None:
        path = next(filter(self._is_missing, self._paths_of(row)), self._paths_of(row)[0])
        detail = "the catalogue has the object, and this file is missing"
        if self._catalogue.is_served(row.fingerprint):
            self._findings.note(path, What.CATALOGUE, f"{detail}; served now, so it may be on its way")
        elif self._findings.has_unread:
            self._findings.problem(path, What.CATALOGUE, f"{detail}; it stays while something cannot be read")
        else:
            self._findings.problem(path, What.CATALOGUE, detail, lambda: self._catalogue.remove([row.name]))

    def _report_different(self, row: StoredObject, item: StoredObject) -> None:
        path = self._paths_of(item)[0]
        detail = f"the catalogue counts {row.num_bytes} bytes in {row.world_size} files"
        detail += f", and it is {item.num_bytes} in {item.world_size}, or it has other parents"
        if self._catalogue.is_served(item.fingerprint):
            self._findings.note(path, What.CATALOGUE, f"{detail}; served now, so it may be on its way")
            return
        self._findings.problem(path, What.CATALOGUE, detail, lambda: self._put_right(item))

    def _put_right(self, item: StoredObject) -> bool:
        return self._catalogue.adopt(item) or self._catalogue.remove([item.name])

    def _report_unknown(self, item: StoredObject) -> None:
        path = self._paths_of(item)[0]
        detail = "the catalogue does not know this object"
        if self._catalogue.is_served(item.fingerprint):
            self._findings.note(path, What.CATALOGUE, f"{detail}; served now, so it may be on its way")
        elif self._is_removing:
            self._findings.note(path, What.CATALOGUE, f"{detail}; objects are being removed now")
        elif item.fingerprint in self._catalogue.of_dead:
            self._findings.note(path, What.CATALOGUE, f"{detail}; of a process that ended: a server looks after it")
        else:
            self._findings.problem(path, What.CATALOGUE, detail, lambda: self._catalogue.adopt(item))

    def _differences(self, catalogue: Catalogue, namespaces: Sequence[CheckedNamespace]) -> _Differences:
        whole = {item.name: item for checked in namespaces for item in as_stored(checked.fingerprint, checked.found)}
        in_order = sorted(namespaces, key=lambda checked: checked.attention not in ("", checked.fingerprint))
        unknown = {
            Name(checked.fingerprint, item.planned.object_id): None
            for checked in in_order
            for item in checked.reachable
        }
        result = _Differences()
        _, slices = catalogue.load(usage.fingerprint for usage in catalogue.usage())
        for rows in slices:
            for row in rows:
                unknown.pop(row.name, None)
                if (item := whole.get(row.name)) is None:
                    result.missing.append(row)
                elif _contents_of(row) != _contents_of(item):
                    result.different.append((row, item))
        result.missing = self._confirm_missing(catalogue, result.missing)
        result.different = self._confirm_different(catalogue, result.different)
        result.unknown = self._confirm_unknown(catalogue, [whole[name] for name in unknown])
        return result

    def _confirm_missing(self, catalogue: Catalogue, rows: Iterable[StoredObject]) -> list[StoredObject]:
        """Looks twice, because an object may be evicted and stored again between two looks."""
        for _ in range(2):
            rows = catalogue.find([row.name for row in rows if any(map(self._is_missing, self._paths_of(row)))])
        return list(rows)

    def _confirm_different(
        self, catalogue: Catalogue, pairs: Sequence[tuple[StoredObject, StoredObject]]
    ) -> list[tuple[StoredObject, StoredObject]]:
        items = {item.name: item for _, item in pairs}
        rows = catalogue.find(items)
        return [(row, items[row.name]) for row in rows if _contents_of(row) != _contents_of(items[row.name])]

    def _confirm_unknown(self, catalogue: Catalogue, items: Sequence[StoredObject]) -> list[StoredObject]:
        known = {row.name for row in catalogue.find([item.name for item in items])}
        left = [item for item in items if item.name not in known]
        self._is_removing = catalogue.totals().removing_bytes > 0  # rows go before files
        return [item for item in left if not any(map(self._is_missing, self._paths_of(item)))]

    def _paths_of(self, item: StoredObject) -> list[str]:
        name = item.name
        return [
            object_path(self._findings.root, name.fingerprint, name.object_id, rank) for rank in range(item.world_size)
        ]

    def _is_missing(self, path: str) -> bool:
        try:
            self._device.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # it says nothing of the file
            return False
        return False


def _contents_of(item: StoredObject) -> tuple[object, ...]:
    planned: PlannedObject = item.planned
    span = planned.start_tokens, planned.end_tokens, planned.num_bytes
    return item.world_size, item.num_bytes, planned.parents, span
