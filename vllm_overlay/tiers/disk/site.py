# SPDX-License-Identifier: Apache-2.0
"""What the parts of one engine's index half share."""

from dataclasses import dataclass

from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.files.checksum import Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import Root
from vllm_overlay.tiers.disk.volume import Quota


@dataclass(frozen=True, slots=True)
class Site:
    """Where an engine keeps its objects, and how, from its start to its end."""

    root: Root
    device: Device
    integrity: Integrity
    quota: Quota
    world_size: int


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine's place in an open catalogue, which it has joined as ``writer``."""

    site: Site
    catalogue: Catalogue
    writer: str

    @property
    def root(self) -> str:
        """The directory of the objects."""
        return self.site.root.path
