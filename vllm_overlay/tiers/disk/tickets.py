# SPDX-License-Identifier: Apache-2.0
"""The disk tier's own part of tickets: what its manager tells its workers beside the object itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStore:
    """``slot`` is the lease that the bytes come from. ``over`` has a file a rank to write over, or nothing.

    ``reset`` names the last ``TierManager.clear``; empty before the first.
    """

    slot: int
    reset: str = ""
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """``reset`` names the last ``TierManager.clear`` before the load was planned; empty before the first."""

    reset: str = ""
