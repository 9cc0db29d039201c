# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt a lookup does not restore, and why: the prompt's end downwards, each token once."""

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.coverage import Coverage
from vllm_overlay.planner.geometry import Geometry


def lost_tokens(
    geometry: Geometry, coverage: Coverage, num_keys: int, num_tokens: int, num_local: int
) -> dict[Reason, int]:
    """The tokens above the local hit and the restore point, by reason; reasons without tokens are left out.

    Called by the planner once a lookup. The sum is ``num_tokens`` less the higher of the two, or 0. From the top:

    - what no tier could restore: what follows the last restore point that the prompt has;
    - ``ATTENTION``: up to there from the last restore point that full attention reaches or, before the tier evicted
      some of it, reached;
    - ``EVICTED``: up to there from the last restore point that full attention reaches;
    - ``STATE``: up to there from the last boundary that has a snapshot;
    - ``WINDOW``: up to there from the restore point.
    """
    reached = min(max(coverage.restore_point, num_local), num_tokens)
    limit = max(0, min(num_tokens - 1, num_keys * geometry.match_unit))
    last = max(geometry.floor_to_restore_point(limit), reached)
    windows = min(max(coverage.window_reach, reached), last)
    states = min(max(coverage.reach, windows), last) if geometry.full else last
    evicted = min(max(coverage.reach_before_eviction, states), last) if geometry.full else states
    lost = {
        **_beyond_restore_points(geometry.match_unit, limit, last, num_tokens),
        Reason.ATTENTION: last - evicted,
        Reason.EVICTED: evicted - states,
        Reason.STATE: states - windows,
        Reason.WINDOW: windows - reached,
    }
    return {reason: tokens for reason, tokens in lost.items() if tokens}


def _beyond_restore_points(match_unit: int, limit: int, last: int, num_tokens: int) -> dict[Reason, int]:
    if limit < match_unit:
        return {Reason.NONE: num_tokens - last}
    whole_units = max(0, limit - last) // match_unit * match_unit
    return {Reason.GRANULARITY: whole_units, Reason.PROMPT_END: num_tokens - last - whole_units}
