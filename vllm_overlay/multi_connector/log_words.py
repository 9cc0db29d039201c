# SPDX-License-Identifier: Apache-2.0
"""What the MultiConnector says of a child in vLLM's log line, in place of every number that it has counted."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from vllm_overlay.common.log_summary import hit_rate, present
from vllm_overlay.multi_connector.counters import Counters
from vllm_overlay.multi_connector.lifecycle import Phase

_PHASES = {phase.value: phase.name.lower().replace("_", " ") for phase in Phase if phase is not Phase.SERVING}
MOST_WORDS = 20
"""How many words of its own a child may add. Somebody else's connector may have much to say."""


def words_of(counters: Counters) -> dict[str, Any]:
    """Empty when nothing was asked of the child and nothing is wrong with it."""
    return present(
        hit=hit_rate(counters.offered_tokens, counters.asked_tokens),
        loaded=_loaded(counters),
        ignored_tokens=sum(counters.ignored_offer_tokens.values()),
        failed_loads=counters.failed_loads,
        exceptions=sum(counters.errors.values()),
        hangs=counters.hangs,
        state=_PHASES.get(counters.gauges.get("state"), ""),
    )


def _loaded(counters: Counters) -> str:
    if not counters.loaded_tokens:
        return ""
    seconds = f" in {counters.load_seconds.sum:.3f} s" if counters.load_seconds.count else ""
    return f"{counters.loaded_tokens} tokens{seconds}"


def joined(ours: Mapping[str, Any], childs: Mapping[str, Any]) -> dict[str, Any]:
    """Our words, then the child's own. Where both have a word, ours holds."""
    own = ((word, value) for word, value in childs.items() if word not in ours)
    return {**ours, **dict(islice(own, MOST_WORDS))}
