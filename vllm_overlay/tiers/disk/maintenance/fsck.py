# SPDX-License-Identifier: Apache-2.0
"""Finds everything that can be wrong under a root by reading every byte, and removes what does not verify.

Links are not followed. What is not ours by its name and place is never changed. It may run while others serve: what
they may be about to finish is a note, not a problem.
"""

import os
from collections.abc import Callable

from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.recognition import require_root
from vllm_overlay.tiers.disk.maintenance.catalogue_check import CatalogueCheck
from vllm_overlay.tiers.disk.maintenance.findings import Findings, Report
from vllm_overlay.tiers.disk.maintenance.guarded_catalogue import GuardedCatalogue
from vllm_overlay.tiers.disk.maintenance.object_check import ObjectCheck
from vllm_overlay.tiers.disk.maintenance.walk import Walk


class Check:
    """One run over one root. ``on_bytes(done, total)`` hears how far it is."""

    def __init__(
        self,
        root: str,
        repair: bool = False,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
        device: Device | None = None,
        integrity: Integrity = XXH3,
    ) -> None:
        self._root = os.path.abspath(root)
        self._repair = repair
        self._on_bytes = on_bytes
        self._device = device or Device()
        self._integrity = integrity

    def run(self) -> Report:
        """Checks the files first, then what the catalogue says of them.

        Raises OSError when the root itself cannot be read, and NotARootError when it is none. Raises ConfigError when a
        version before 0.3.0 uses what is to be repaired.
        """
        kind = require_root(self._root)
        findings = Findings(self._root, self._repair)
        walk = Walk(findings, kind, self._device, has_key=bool(self._integrity.key))
        walk.check_root()
        with GuardedCatalogue(self._root, self._device, self._repair) as catalogue:
            walk.run(catalogue)
            objects = ObjectCheck(findings, catalogue, self._device, self._integrity, self._on_bytes)
            namespaces = objects.run(walk.files)
            CatalogueCheck(findings, catalogue, self._device, self._integrity).run(namespaces)
        findings.report.num_namespaces = len(walk.files)
        return findings.report
