# SPDX-License-Identifier: Apache-2.0
"""Removes namespaces that nobody will serve again: what a reset began, once its process is gone, and empty ones."""

import contextlib
import os

from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.files.device import Device, remove_quietly
from vllm_overlay.tiers.disk.files.namespace import DESCRIPTION, LEARNED
from vllm_overlay.tiers.disk.files.scan import FAN_OUT, namespaces_under
from vllm_overlay.tiers.disk.maintenance.remover import Remover


def remove_abandoned(catalogue: Catalogue, remover: Remover, root: str, device: Device) -> None:
    """Raises CatalogueError. The next call, of whatever process, finds what could not be removed."""
    known = catalogue.namespaces()
    for namespace in known:
        if namespace.is_temporary and not namespace.is_served and not namespace.is_empty:
            _, slices = catalogue.load([namespace.fingerprint])
            found = (item for slice_ in slices for item in slice_)
            remover.remove([item.name for item in found if item.fingerprint == namespace.fingerprint])
    gone = set(catalogue.drop_empty_namespaces())
    there = {namespace.fingerprint for namespace in known} - gone
    for fingerprint in namespaces_under(root):
        if fingerprint not in there:
            _remove_directory(os.path.join(root, fingerprint), device)


def _remove_directory(top: str, device: Device) -> None:
    """It stays when it holds a file of an object, or somebody's."""
    with contextlib.suppress(OSError):
        for name in filter(FAN_OUT.fullmatch, os.listdir(top)):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(top, name))
        if set(os.listdir(top)) <= {DESCRIPTION, LEARNED}:
            for name in (DESCRIPTION, LEARNED):
                remove_quietly(device, os.path.join(top, name))
            os.rmdir(top)
