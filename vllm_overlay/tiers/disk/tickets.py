# SPDX-License-Identifier: Apache-2.0
"""The disk tier's own part of tickets: what its manager tells its workers beside the object itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStore:
    """``reset`` names the last ``TierManager.clear`` before the store was planned; empty before the first."""

    reset: str = ""


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """``reset`` names the last ``TierManager.clear`` before the load was planned; empty before the first."""

    reset: str = ""
