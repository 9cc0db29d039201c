# SPDX-License-Identifier: Apache-2.0
"""Tells a catalogue that is new or incomplete of all files, for tools."""

import logging
import os
import time

from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import Catalogue, Namespace
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.object_file import header_reader
from vllm_overlay.tiers.disk.files.ownership import shut_bits
from vllm_overlay.tiers.disk.files.scan import FoundFile, namespaces_under
from vllm_overlay.tiers.disk.maintenance.catalogue_access import without_interruption
from vllm_overlay.tiers.disk.maintenance.header_scan import HeaderScan
from vllm_overlay.tiers.disk.maintenance.rebuild import Rebuild

_POLL_S = 0.2
logger = logging.getLogger(__name__)


def complete(catalogue: Catalogue, root: str, device: Device, integrity: Integrity) -> list[FoundFile]:
    """Bring a joined catalogue to where it knows all files, or wait for the process that does so.

    Returns the files that are of no use to anybody. Raises CatalogueError, OSError, and ConfigError when a key is
    missing.
    """
    is_said = False
    while not catalogue.totals().is_complete:
        if catalogue.begin_rebuild():
            useless = adopt_all(catalogue, root, device, integrity)
            catalogue.end_rebuild()
            return useless
        if not is_said:
            is_said = True
            logger.info("disk tier: another process rebuilds the catalogue of %s: waiting for it", root)
        time.sleep(_POLL_S)
    return []


def adopt_all(catalogue: Catalogue, root: str, device: Device, integrity: Integrity) -> list[FoundFile]:
    """Adopt every whole object under ``root``, in a rebuild that was begun. Returns and raises as ``complete`` does."""
    if missing := missing_keys(root, integrity):
        raise ConfigError(
            f"{root} has no complete catalogue, and to make one needs the key {missing[0]}: give --integrity-key-file, "
            "or start a server that has the key"
        )
    scan = HeaderScan(root, device, shut_bits(bool(integrity.key)), lambda: False)
    readers = [header_reader(each) for each in dict.fromkeys((integrity, XXH3))]
    known = {
        usage.fingerprint: Namespace(usage.fingerprint, usage.partner, usage.is_temporary)
        for usage in without_interruption(catalogue.usage)
    }
    return Rebuild(catalogue, root, scan, known).run(readers, readers)


def missing_keys(root: str, integrity: Integrity) -> list[str]:
    """The names of keys that namespaces under ``root`` say they need, and that were not given."""
    said = {manifest_or_empty(os.path.join(root, fingerprint)).integrity for fingerprint in namespaces_under(root)}
    return sorted(said - {"", XXH3.name, integrity.name})
