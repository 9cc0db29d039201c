# SPDX-License-Identifier: Apache-2.0
"""The bar for concurrent requests: each token near the best, and its logprob near its own, in an uncached engine.

Near is 0.1. Kernels round by the batch: of the fifty requests of ``tests/http/test_concurrency.py``, vLLM without a
connector had one or two that were 0.03 to 0.061 away, in each of eleven bursts (by hand, 2026-11-29, when the prompts
were half as long again). What
``test_faults_are_seen.py`` breaks is further away: by 0.5 with one attention chunk zeroed, by 7 with the state.

A preempted request computes its prompt *and what it has decoded so far* anew, by prefill, and vLLM's
prefill and decode kernels round differently. So an answer may also be what an uncached engine decodes after a prefill
of prompt and first tokens. Without that, answers are up to 0.16 away, with or without a connector.
"""

from typing import Protocol

from tests.engine.client import Engine, Output

BAR = 0.1
BAR_OF_DRAFTS = 0.5
"""Of an engine that speculates, held against one that does not: vLLM's kernels round otherwise there, with a connector
or without, and whether or not there are drafts. Measured once by hand, with MTP and no
connector: 84 answers of bursts were up to 0.31 away. Held against a prompt whose first 64 tokens were others, 14 of
them were 1.5 to 3.7 away."""
FORCE_TOKENS = "tests.engine.forcing:ForceTokens"
UNCACHED = {"enable_prefix_caching": False, "prefix_match_unit": None, "logits_processors": [FORCE_TOKENS]}
"""Arguments of the engine that judges by the bar."""
PLAIN = {"logits_processors": [FORCE_TOKENS]}
"""Of one that judges to the last bit: without a connector, and with vLLM's prefix cache, so that its steps end where
those of an engine with a connector do. An uncached one ends them elsewhere, where some processors round otherwise."""


def computed(plain: Engine, tokens: list[int], max_tokens: int = 8) -> Output:
    """What an engine with ``PLAIN`` answers when it has nothing of the prompt."""
    plain.reset_device_cache()
    answer = plain.generate(tokens, max_tokens)
    assert answer.num_cached_tokens == 0
    return answer


class Answer(Protocol):
    """An output of a request: of the engine in process, or over HTTP."""

    token_ids: list[int]
    logprobs: list[float]


def distance(reference: Engine, tokens: list[int], answer: Answer) -> float:
    """How far the worst token of an answer is below the best at its place, or its logprob from its own, when
    ``reference`` decodes the answer after a prefill of the prompt; where that is over the bar, after the preemptions
    that explain it best."""
    distances = _distances(reference, tokens, answer, num_prefilled=0)
    num_prefilled = 0
    while next((place for place, far in enumerate(distances) if far > BAR), 0) > num_prefilled:
        num_prefilled += 1
        preempted = _distances(reference, tokens, answer, num_prefilled)
        distances[num_prefilled:] = map(min, distances[num_prefilled:], preempted)
    return max(distances)


def _distances(reference: Engine, tokens: list[int], answer: Answer, num_prefilled: int) -> list[float]:
    """One for each token that is decoded; NaN is infinitely far away."""
    prefilled, decoded = answer.token_ids[:num_prefilled], answer.token_ids[num_prefilled:]
    pairs = reference.call("forced_logprobs", prompt=tokens + prefilled, output=decoded)
    return [
        max(best - own, abs(own - seen)) if best == best and own == own and seen == seen else float("inf")
        for (own, best), seen in zip(pairs, answer.logprobs[num_prefilled:], strict=True)
    ]
