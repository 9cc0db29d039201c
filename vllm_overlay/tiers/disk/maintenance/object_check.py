# SPDX-License-Identifier: Apache-2.0
"""Checks every byte of every object's file, and whether each object can be reached."""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_overlay import versions
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity, is_encrypted
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import ObjectHeader
from vllm_overlay.tiers.disk.files.listing import FoundObject, parents_first
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.namespace import parse_file_name
from vllm_overlay.tiers.disk.files.object_file import BadObject, verify_file
from vllm_overlay.tiers.disk.files.scan import FoundFile
from vllm_overlay.tiers.disk.maintenance.findings import Findings, What
from vllm_overlay.tiers.disk.maintenance.guarded_catalogue import GuardedCatalogue


@dataclass(slots=True)
class CheckedNamespace:
    """The whole objects of a namespace, and those of them that can be reached, each after its parents.

    ``attention`` is where its snapshots' parents lie, empty when nobody says.
    """

    fingerprint: str
    attention: str
    found: list[FoundObject] = field(default_factory=list)
    reachable: list[FoundObject] = field(default_factory=list)

    @property
    def chunks(self) -> list[FoundObject]:
        return [item for item in self.found if not item.planned.object_id.is_snapshot]

    @property
    def snapshots(self) -> list[FoundObject]:
        return [item for item in self.found if item.planned.object_id.is_snapshot]


class ObjectCheck:
    """Reads all files of a walk. ``on_bytes(done, total)`` hears how far it is."""

    def __init__(
        self,
        findings: Findings,
        catalogue: GuardedCatalogue,
        device: Device,
        integrity: Integrity,
        on_bytes: Callable[[int, int], None],
    ) -> None:
        self._findings = findings
        self._report = findings.report
        self._catalogue = catalogue
        self._device = device
        self._integrity = integrity
        self._on_bytes = on_bytes
        self._done = self._total = 0

    def run(self, files: dict[str, list[FoundFile]]) -> list[CheckedNamespace]:
        """Checks all namespaces and returns those that could be verified. What is wrong with them is a finding, and
        repaired."""
        self._total = sum(file.num_bytes for of_one in files.values() for file in of_one)
        namespaces = [
            self._read_namespace(fingerprint, files[fingerprint], candidates)
            for fingerprint in sorted(files)
            if (candidates := self._integrities_of(fingerprint))
        ]
        self._catalogue.look_who_serves()
        self._check_reach(namespaces)
        return namespaces

    def _integrities_of(self, fingerprint: str) -> tuple[Integrity, ...]:
        """The checksums that the namespace's files may be verified with: the one that its words name, or both where it
        has none."""
        manifest = manifest_or_empty(os.path.join(self._findings.root, fingerprint))
        if manifest.object_format != versions.DISK_OBJECT:
            detail = f"not verified: its objects have version {manifest.object_format} of the disk format"
            self._findings.note(fingerprint, What.VERSION, detail)
            return ()
        said = manifest.integrity
        known = tuple(dict.fromkeys((self._integrity, XXH3)))
        chosen = tuple(integrity for integrity in known if said in ("", integrity.name))
        if not chosen:
            option = "--encryption-key-file" if is_encrypted(said) else "--integrity-key-file"
            detail = f"not verified: {option} with the key {said} is needed"
            self._findings.note(fingerprint, What.KEY, detail)
        return chosen

    # Bytes.

    def _read_namespace(
        self, fingerprint: str, files: Sequence[FoundFile], integrities: tuple[Integrity, ...]
    ) -> CheckedNamespace:
        attention = manifest_or_empty(os.path.join(self._findings.root, fingerprint)).attention
        namespace = CheckedNamespace(fingerprint, attention)
        by_object: defaultdict[ObjectId, dict[int, tuple[FoundFile, ObjectHeader]]] = defaultdict(dict)
        for file in files:
            parsed = parse_file_name(file.name)
            assert parsed is not None
            header = self._read(fingerprint, parsed, file, integrities)
            if header is not None:
                by_object[parsed[0]][parsed[1]] = file, header
        self._catalogue.look_who_serves()
        for ranks in by_object.values():
            self._add(namespace, ranks)
        return namespace

    def _add(self, namespace: CheckedNamespace, ranks: dict[int, tuple[FoundFile, ObjectHeader]]) -> None:
        files = tuple(ranks[rank][0] for rank in sorted(ranks))
        planned = {header.planned for _, header in ranks.values()}
        worlds = {header.world_size for _, header in ranks.values()}
        if len(planned) == 1 and len(worlds) == 1 and len(ranks) == worlds.pop():
            mtime = max(file.mtime for file in files)
            namespace.found.append(FoundObject(planned.pop(), mtime, files))
        else:
            detail = f"ranks {', '.join(map(str, sorted(ranks)))} are not all there are, or do not say the same"
            self._not_whole(namespace, files, What.INCOMPLETE, detail)

    def _read(
        self, fingerprint: str, parsed: tuple[ObjectId, int], file: FoundFile, integrities: tuple[Integrity, ...]
    ) -> ObjectHeader | None:
        """The header of a file that verifies and is what its name and place say."""
        before = self._done
        try:
            header = self._verify(file.path, integrities)
            if (header.fingerprint.hex(), (header.object_id, header.rank)) != (fingerprint, parsed):
                raise BadObject(Reason.HEADER)
        except BadObject as bad:
            detail = f"{file.num_bytes} bytes: {bad.__cause__ or bad.reason}"
            if not bad.is_bad:
                self._findings.unread(file.path, detail)
            elif bad.reason != Reason.MISSING and self._is_as_found(file):
                self._remove(fingerprint, file, What(bad.reason), detail)
            return None
        finally:
            self._done = before
            self._count(file.num_bytes)
        self._report.num_files += 1
        self._report.num_bytes += file.num_bytes
        return header

    def _verify(self, path: str, integrities: tuple[Integrity, ...]) -> ObjectHeader:
        for integrity in integrities[:-1]:
            try:
                return verify_file(self._device, path, self._count, integrity)
            except BadObject as bad:
                if not bad.is_bad:
                    raise
        return verify_file(self._device, path, self._count, integrities[-1])

    def _count(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._on_bytes(self._done, self._total)

    def _is_as_found(self, file: FoundFile) -> bool:
        """Whether the file was neither evicted nor stored again since the walk."""
        try:
            found = os.lstat(file.path)
        except FileNotFoundError:
            return False
        return (found.st_size, found.st_mtime) == (file.num_bytes, file.mtime)

    # What is no whole object.

    def _remove(self, fingerprint: str, file: FoundFile, what: What, detail: str) -> None:
        before = self._catalogue.num_removed
        repair = self._catalogue.remove_object_of
        self._findings.problem(file.path, what, detail, lambda: repair(fingerprint, file.path))
        if (others := self._catalogue.num_removed - before - 1) > 0:
            self._findings.note(file.path, What.UNREACHABLE, f"{others} objects on top of it were removed with it")

    def _not_whole(self, namespace: CheckedNamespace, files: Sequence[FoundFile], what: What, detail: str) -> None:
        for file in filter(self._is_as_found, files):
            if self._catalogue.is_served(namespace.fingerprint):
                self._findings.note(file.path, what, f"{detail}; served now, so it may be on its way")
            elif self._findings.has_unread:
                self._findings.problem(file.path, what, f"{detail}; it stays while something cannot be read")
            else:
                self._remove(namespace.fingerprint, file, what, detail)

    # Reach.

    def _check_reach(self, namespaces: Sequence[CheckedNamespace]) -> None:
        chunks: dict[str, set[ObjectId]] = {}
        for namespace in namespaces:
            good, lost = parents_first(namespace.chunks)
            chunks[namespace.fingerprint] = {item.planned.object_id for item in good}
            self._settle(namespace, good, lost)
        for namespace in namespaces:
            of_one = namespace.attention
            candidates = [chunks.get(of_one, set())] if of_one else list(chunks.values())
            good, lost = [], []
            for item in namespace.snapshots:
                is_good = any(known.issuperset(item.planned.parents) for known in candidates)
                (good if is_good else lost).append(item)
            self._settle(namespace, good, lost)

    def _settle(self, namespace: CheckedNamespace, good: Sequence[FoundObject], lost: Sequence[FoundObject]) -> None:
        namespace.reachable += good
        self._report.num_objects += len(good)
        for item in lost:
            self._not_whole(namespace, item.files, What.UNREACHABLE, "an object below it is missing")
