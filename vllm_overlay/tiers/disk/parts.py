# SPDX-License-Identifier: Apache-2.0
"""The disk tier's own part of tickets: what its manager tells its workers beside the object itself."""

import msgspec

from vllm_overlay.tiers.disk.catalogue import File


class DiskPart(msgspec.Struct, frozen=True, gc=False):
    """The file of a store or a load, and the namespace that its object is in."""

    file: File
    fingerprint: str
    is_private: bool = False
