# SPDX-License-Identifier: Apache-2.0
"""A CPU tier whose loads take as long as they are told: ``"tier": "bench.paced_tier:PacedTierSpec"``."""

import time
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from vllm_overlay.tiers.base import FetchResult, LoadTicket, StoreResult, WorkerContext
from vllm_overlay.tiers.cpu import Arena, CpuTierSettings, CpuTierSpec, CpuTierWorker


class PacedTierSettings(CpuTierSettings, kw_only=True, forbid_unknown_fields=True):
    """The CPU tier's, and the pace."""

    round_trip_s: Annotated[float, Meta(description="seconds that each load takes beside its objects", ge=0)] = 0.0
    load_s_per_object: Annotated[float, Meta(description="seconds that each chunk or snapshot takes", ge=0)] = 0.0


class PacedTierWorker(CpuTierWorker):
    """Loads end when they are due, and stores end at once."""

    def __init__(self, num_units: int, unit_bytes: int, settings: PacedTierSettings) -> None:
        super().__init__(num_units, unit_bytes)
        self._settings = settings
        self._due: dict[str, float] = {}

    def begin_load(self, load_id: str, tickets: Sequence[LoadTicket]) -> None:
        super().begin_load(load_id, tickets)
        seconds = self._settings.round_trip_s + len(tickets) * self._settings.load_s_per_object
        self._due[load_id] = time.monotonic() + seconds

    def poll(self) -> tuple[list[StoreResult], list[FetchResult]]:
        stored, fetched = super().poll()
        now = time.monotonic()
        self._fetched = [one for one in fetched if self._due[one.load_id] > now]
        return stored, [one for one in fetched if self._due[one.load_id] <= now]


class PacedTierSpec(CpuTierSpec):
    """See above."""

    settings_type = PacedTierSettings
    prior_load_weight = 0.8

    def build_worker(self, context: WorkerContext) -> tuple[CpuTierWorker, Arena]:
        _, arena = super().build_worker(context)
        assert isinstance(self.settings, PacedTierSettings)
        return PacedTierWorker(arena.num_units, arena.unit_bytes, self.settings), arena
