# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt a lookup does not restore, and why. Each token counts once, from the prompt's end down."""

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.coverage import Coverage
from vllm_overlay.planner.geometry import Geometry


def lost_tokens(
    geometry: Geometry, coverage: Coverage, num_keys: int, num_tokens: int, num_local: int
) -> dict[Reason, int]:
    """The tokens above the local hit and the restore point, by reason. Reasons without tokens are left out.

    Called by the planner once a lookup. The sum is ``num_tokens`` less the higher of the two, or 0. Each reason has the
    tokens below those of the reason before it, down to its own bound:

    - what no tier could restore: down to the last restore point that the prompt has;
    - ``ATTENTION``: down to the last one that full attention reaches, or reached before the tier evicted some of it;
    - ``EVICTED``: down to the last restore point that full attention reaches;
    - ``STATE``: down to the last boundary that has a snapshot;
    - ``WINDOW``: down to the restore point.
    """
    reached = min(max(coverage.restore_point, num_local), num_tokens)
    limit = max(0, min(num_tokens - 1, num_keys * geometry.match_unit))
    last = max(geometry.floor_to_restore_point(limit), reached)
    windows = min(max(coverage.window_reach, reached), last)
    states = min(max(coverage.reach, windows), last) if geometry.full else last
    evicted = min(max(coverage.reach_before_eviction, states), last) if geometry.full else states
    lost = {
        **_beyond_restore_points(geometry.match_unit, limit, last, num_keys, num_tokens),
        Reason.ATTENTION: last - evicted,
        Reason.EVICTED: evicted - states,
        Reason.STATE: states - windows,
        Reason.WINDOW: windows - reached,
    }
    return {reason: tokens for reason, tokens in lost.items() if tokens}


def _beyond_restore_points(match_unit: int, limit: int, last: int, num_keys: int, num_tokens: int) -> dict[Reason, int]:
    if limit < match_unit:
        return {Reason.NONE: num_tokens - last}
    whole_units = max(0, limit - last) // match_unit * match_unit
    dropped = max(0, (num_tokens - 1) // match_unit - num_keys) * match_unit
    return {
        Reason.GRANULARITY: whole_units,
        Reason.DRAFTER: dropped,
        Reason.PROMPT_END: num_tokens - last - whole_units - dropped,
    }
