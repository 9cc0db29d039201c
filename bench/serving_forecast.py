# SPDX-License-Identifier: Apache-2.0
"""What the replay of ``bench/hit_rate.py`` foretells of a server of ``bench/serving.py``."""

from collections.abc import Sequence

from bench.geometries import Model
from bench.hit_replay import Clock, HitReplay
from bench.replay_tiers import IndexShelf
from bench.scaled_trace import ScaledRequest, unit_names
from bench.serving_sides import BLOCK_TOKENS, MATCH_UNIT, SNAPSHOT_BYTES, STEP_TOKENS, TOKEN_BYTES, Side, Sizes
from bench.trace import TraceRequest
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

TINY = Model("tools/tiny_model.py", TOKEN_BYTES, SNAPSHOT_BYTES, block_tokens=BLOCK_TOKENS)


def forecast(requests: Sequence[ScaledRequest], side: Side, sizes: Sizes) -> int | None:
    """Tokens of prompts that are cached when they come: in vLLM's own cache, or in a tier. None: of others' tiers.

    Requests are served one at a time and take none. Both of our tiers together count as one with the disk tier's
    capacity, because what the CPU tier holds the disk tier has been given too.
    """
    if side.cpu and not side.is_ours:
        return None
    clock = Clock()
    geometry = TINY.geometry(MATCH_UNIT)
    policy: EvictionPolicy[Entry] = LearnedEviction(clock) if side.policy == "learned" else LeastRecentlyUsed()
    policy.serve(geometry)
    device = IndexShelf(sizes.device_blocks * BLOCK_TOKENS * TOKEN_BYTES)
    tier = IndexShelf(sizes.disk_bytes if side.disk else sizes.cpu_bytes if side.cpu else 0, policy)
    replay = HitReplay(geometry, tier, clock, STEP_TOKENS, device=device, last_block=True)
    served = (replay.serve(place, _traced(request)) for place, request in enumerate(requests))
    return sum(one.num_local + one.num_restored for one in served)


def _traced(request: ScaledRequest) -> TraceRequest:
    units = tuple(name & (1 << 64) - 1 for name in unit_names(request.prompt, MATCH_UNIT))
    return TraceRequest(request.arrival_s, len(request.prompt), request.max_tokens, units)
