# SPDX-License-Identifier: Apache-2.0
"""A start of either half of the tier: both open the root, whichever comes first."""

import pytest

from tests.tiers.disk.objects import OBJECT
from tests.tiers.disk.tier_pair import NAMESPACE, close_tier, settings
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.worker import DiskTierWorker


def open_tier(root, device=None, **changes):
    close_tier(DiskTierManager(settings(root, **changes), NAMESPACE, 1, OBJECT, device))


def open_worker(root, device=None, **changes):
    DiskTierWorker(settings(root, **changes), NAMESPACE, 0, 1, 8192, OBJECT, device).close(1.0)


HALVES = pytest.mark.parametrize("start", [open_tier, open_worker])
