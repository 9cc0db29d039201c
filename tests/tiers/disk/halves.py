# SPDX-License-Identifier: Apache-2.0
"""A start of either half of the tier: both open the root, whichever comes first."""

import os

import pytest

from tests.tiers.disk.objects import OBJECT
from tests.tiers.disk.tier_pair import NAMESPACE, close_tier, settings
from vllm_overlay.tiers.disk.files.checksum import XXH3
from vllm_overlay.tiers.disk.files.mounts import WRITE_AHEAD
from vllm_overlay.tiers.disk.files.root import Root
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.site import Seat, Site
from vllm_overlay.tiers.disk.volume import Quota
from vllm_overlay.tiers.disk.worker import DiskTierWorker


def open_tier(root, device=None, **changes):
    close_tier(DiskTierManager(settings(root, **changes), NAMESPACE, 1, OBJECT, device))


def open_worker(root, device=None, **changes):
    DiskTierWorker(settings(root, **changes), NAMESPACE, 0, 1, 8192, OBJECT, device).close(1.0)


HALVES = pytest.mark.parametrize("start", [open_tier, open_worker])


def seat_in(root, catalogue, writer, device):
    """The place of an engine that has joined the catalogue of a root on a local disk."""
    quota = Quota(capacity_bytes=1 << 30, min_free_bytes=0, largest_bytes=OBJECT)
    return Seat(Site(Root(str(root), WRITE_AHEAD, os.stat(root).st_dev), device, XXH3, quota, 1), catalogue, writer)
