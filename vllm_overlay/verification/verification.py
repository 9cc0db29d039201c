# SPDX-License-Identifier: Apache-2.0
"""Asks one server, or two lives of one, the same prompts: computed, from vLLM's device cache, and restored."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from vllm_overlay.metrics import CONNECTOR
from vllm_overlay.server.api_client import ApiClient, ApiError, Completion, Metrics
from vllm_overlay.verification.answers import NUM_ANSWER_TOKENS, Answers, Computed, NothingToVerify
from vllm_overlay.verification.comparison import Comparison, Verdict, compare
from vllm_overlay.verification.prompts import TEXT, Prompt, extension, make_prompts

NUM_CANDIDATES = 5
"""Alternatives whose logprobs are asked for with each token: vLLM's own limit if none is set."""
_LOADED_BYTES = "vllm:hybrid_offload_loaded_bytes_total"
_DROPPED = "vllm:hybrid_offload_dropped_tokens"
_TOO_SLOW = "vllm:kv_connector_too_slow_total"
_STARTED = "process_start_time_seconds"
_GAUGES = tuple(f"vllm:hybrid_offload_{name}_tokens" for name in ("restore_unit", "chunk", "block"))

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One restored answer. ``sources``: bytes that each connector loaded for it."""

    prompt: Prompt
    num_restored: int
    sources: dict[str, int]
    comparison: Comparison


def compute(api: ApiClient, longest: int, seed: int, say: Say) -> Computed:
    """Every prompt's answer, of prompts of at most ``longest`` tokens. Raises NothingToVerify and ApiError.

    A salt of the run's own keeps the prompts apart from everything that was stored before: nothing of them is found
    unless this run has stored it.
    """
    salt = secrets.token_hex(16)
    longest_request = api.max_model_len()
    api.reset_prefix_cache()  # whether it can be, before minutes are spent
    alphabet = sorted(set(api.tokenize(TEXT)))
    say("warm up")
    _ask(api, Prompt("warm-up", tuple(alphabet[:2]), 0), f"{salt}-warm-up")
    metrics = api.settled_metrics()
    unit, chunk, block = _geometry(metrics)
    longest = min(longest, longest_request - NUM_ANSWER_TOKENS)
    try:
        prompts = make_prompts(alphabet, unit, chunk, block, longest, seed, _largest(metrics, _DROPPED))
    except ValueError as error:
        raise NothingToVerify(f"{error}: raise --longest, or the server's --max-model-len") from error
    answers = []
    for number, prompt in enumerate(prompts, 1):
        say(f"compute {number} of {len(prompts)}: {prompt.name}")
        computed, again = _compute(api, prompt, salt), _compute(api, prompt, f"{salt}-again")
        answers.append(Answers(prompt, computed, again, _ask(api, prompt, salt)))
    longer = extension(prompts[-1], alphabet, len(prompts[0].tokens), seed)
    if len(longer.tokens) + NUM_ANSWER_TOKENS <= longest_request:
        say(f"compute one more: {longer.name}")
        # Under other salts: under the run's own it would be found in part, and stored.
        computed, again = (_compute(api, longer, f"{salt}-{which}") for which in ("longer", "longer-again"))
        answers.append(Answers(longer, computed, again, None))
    return Computed(salt=salt, server_started=api.wait_for_stores().value(_STARTED), answers=answers)


def require_restart(api: ApiClient, computed: Computed) -> None:
    """Raises NothingToVerify if the server is the one that has computed, as far as it says so, and ApiError."""
    if computed.server_started and api.metrics().value(_STARTED) == computed.server_started:
        raise NothingToVerify("the server has not been restarted since the file was written: restart it first")


def restore(api: ApiClient, computed: Computed, tolerance: float, say: Say) -> list[Result]:
    """Every prompt again, each with an empty device cache. Raises ApiError."""
    results = []
    for number, answers in enumerate(computed.answers, 1):
        prompt = answers.prompt
        say(f"restore {number} of {len(computed.answers)}: {prompt.name}")
        if number > 1:
            api.wait_for_stores()
        api.reset_prefix_cache()
        metrics_before = api.settled_metrics()
        answer = _ask(api, prompt, computed.salt)
        metrics = api.settled_metrics()
        before, after = _loaded_bytes(metrics_before), _loaded_bytes(metrics)
        sources = {name: after[name] - before.get(name, 0) for name in after if after[name] > before.get(name, 0)}
        comparison = compare(answer, answers.computed, answers.by_device, tolerance)
        if answer.num_cached_tokens < prompt.boundary:
            detail = f"{answer.num_cached_tokens} of {prompt.boundary} tokens were restored"
            comparison = Comparison(Verdict.NOT_RESTORED, detail=detail)
            if not sources and _too_slow(metrics) > _too_slow(metrics_before):
                comparison = Comparison(Verdict.LEFT, detail='load_weight "auto" expected computing to be faster')
        results.append(Result(prompt, answer.num_cached_tokens, sources, comparison))
    return results


def _geometry(metrics: Metrics) -> tuple[int, int, int]:
    """Restore unit, chunk and block in tokens: of several connectors the largest. A first request brings them."""
    unit, chunk, block = (_largest(metrics, name) for name in _GAUGES)
    if not (unit and chunk and block):
        raise NothingToVerify(
            "the server has no HybridOffloadConnector: start it with a --kv-transfer-config that names one"
        )
    return unit, chunk, block


def _largest(metrics: Metrics, name: str) -> int:
    """A gauge's value, of several connectors and engines the largest; 0 when nobody has it."""
    return int(max((sample.value for sample in metrics.samples(name)), default=0))


def _compute(api: ApiClient, prompt: Prompt, salt: str) -> Completion:
    answer = _ask(api, prompt, salt)
    if answer.num_cached_tokens:
        raise ApiError(f"{answer.num_cached_tokens} tokens of a prompt were found that nobody has sent yet")
    if any(map(math.isnan, answer.logprobs)):
        raise ApiError("the server computes logprobs that are no numbers: no restore is needed to see that it is wrong")
    return answer


def _ask(api: ApiClient, prompt: Prompt, salt: str) -> Completion:
    """Of the first engine. With several, vLLM would send each request to another one, which has another CPU tier."""
    return api.complete(
        prompt.tokens,
        NUM_ANSWER_TOKENS,
        engine=0,
        cache_salt=salt,
        logprobs=NUM_CANDIDATES,
        return_tokens_as_token_ids=True,
    )


def _loaded_bytes(metrics: Metrics) -> dict[str, int]:
    return {name: int(num_bytes) for name, num_bytes in metrics.values(_LOADED_BYTES, CONNECTOR).items()}


def _too_slow(metrics: Metrics) -> float:
    """How many offers were left because computing was expected to be faster."""
    return sum(metrics.values(_TOO_SLOW, CONNECTOR).values())
