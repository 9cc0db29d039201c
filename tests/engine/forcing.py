# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing by decoding: a logits processor that lets a request choose the given tokens only.

A prefill over prompt and output would also tell how likely each token was, but prefill and decode kernels round
differently: with it, even an undisturbed run is up to 0.1 away from its own best tokens.
"""

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

FORCED = "forced_tokens"
"""Key of the tokens in a request's ``extra_args``."""


class ForceTokens(AdapterLogitsProcessor):
    """Give it to ``LLM(logits_processors=...)``. Reported logprobs are those before it: vLLM's default."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(FORCED)
        if forced is None:
            return None

        def choose(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            only = torch.full_like(logits, float("-inf"))
            only[forced[len(output)]] = 0.0
            return only

        return choose
