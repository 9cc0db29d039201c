# SPDX-License-Identifier: Apache-2.0
"""Asks one server, or two lives of one, the same prompts: computed, from vLLM's device cache, and restored."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from vllm_overlay.metrics import CONNECTOR
from vllm_overlay.server.api_client import ApiClient, ApiError, Completion, Metrics
from vllm_overlay.verification.comparison import Comparison, Verdict, compare
from vllm_overlay.verification.prompts import TEXT, Prompt, extension, make_prompts

NUM_ANSWER_TOKENS = 8
NUM_CANDIDATES = 5
"""Alternatives whose logprobs are asked for with each token: vLLM's own limit if none is set."""
_LOADED_BYTES = "vllm:hybrid_offload_loaded_bytes_total"
_TOO_SLOW = "vllm:kv_connector_too_slow_total"
_GAUGES = tuple(f"vllm:hybrid_offload_{name}_tokens" for name in ("restore_unit", "chunk", "block"))


class NothingToVerify(Exception):
    """The server cannot be verified. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Result:
    """One restored answer. ``sources``: bytes that each connector loaded for it."""

    life: str
    prompt: Prompt
    num_restored: int
    sources: dict[str, int]
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Answers:
    """What a prompt's answer is, computed twice, and as a hit in vLLM's own device cache (None: not asked)."""

    prompt: Prompt
    computed: Completion
    computed_again: Completion
    by_device: Completion | None


class Verification:
    """First ``compute`` on a server, then ``restore`` on it or on one that was started with the same settings.

    The prompts are the same in each run. A salt of the run's own keeps them apart from everything that was stored
    before: nothing of them is found unless this run has stored it.
    """

    def __init__(self, tolerance: float, longest: int, seed: int, say: Callable[[str], None]) -> None:
        self._tolerance = tolerance
        self._longest = longest
        self._seed = seed
        self._say = say
        self._salt = secrets.token_hex(16)
        self._answers: list[Answers] = []
        self.results: list[Result] = []

    @property
    def num_prompts(self) -> int:
        return len(self._answers)

    @property
    def num_equal_recomputed(self) -> int:
        """Prompts whose two computed answers are equal to the last bit."""
        return sum(answers.computed.same_as(answers.computed_again) for answers in self._answers)

    def compute(self, api: ApiClient) -> None:
        """Every prompt's answer. Raises NothingToVerify and ApiError."""
        alphabet = sorted(set(api.tokenize(TEXT)))
        prompts = self._prompts(api, alphabet)
        for number, prompt in enumerate(prompts, 1):
            self._say(f"compute {number} of {len(prompts)}: {prompt.name}")
            computed, again = self._ask(api, prompt, self._salt), self._ask(api, prompt, f"{self._salt}-again")
            self._keep(Answers(prompt, computed, again, self._ask(api, prompt, self._salt)))
        longer = extension(prompts[-1], alphabet, len(prompts[0].tokens), self._seed)
        if len(longer.tokens) + NUM_ANSWER_TOKENS <= api.max_model_len():
            self._say(f"compute one more: {longer.name}")
            # Under other salts: under the run's own it would be found in part, and stored.
            computed, again = (self._ask(api, longer, f"{self._salt}-{which}") for which in ("longer", "again"))
            self._keep(Answers(longer, computed, again, None))
        api.wait_for_stores()

    def _keep(self, answers: Answers) -> None:
        num_cached = answers.computed.num_cached_tokens
        if num_cached:
            raise ApiError(f"{num_cached} tokens of a prompt were found that nobody has sent yet")
        self._answers.append(answers)

    def restore(self, api: ApiClient, life: str) -> None:
        """Every prompt again, each with an empty device cache. ``life`` says in words what was before."""
        for number, answers in enumerate(self._answers, 1):
            prompt = answers.prompt
            self._say(f"restore {number} of {len(self._answers)}, {life}: {prompt.name}")
            if number > 1:
                api.wait_for_stores()
            api.reset_prefix_cache()
            metrics_before = api.settled_metrics()
            answer = self._ask(api, prompt, self._salt)
            metrics = api.settled_metrics()
            before, after = _loaded_bytes(metrics_before), _loaded_bytes(metrics)
            sources = {name: after[name] - before.get(name, 0) for name in after if after[name] > before.get(name, 0)}
            comparison = compare(answer, answers.computed, answers.by_device, self._tolerance)
            if answer.num_cached_tokens < prompt.boundary:
                detail = f"{answer.num_cached_tokens} of {prompt.boundary} tokens were restored"
                if _too_slow(metrics) > _too_slow(metrics_before):
                    detail += ': load_weight "auto" found computing faster; give numbers for the verification'
                comparison = Comparison(Verdict.NOT_RESTORED, detail=detail)
            self.results.append(Result(life, prompt, answer.num_cached_tokens, sources, comparison))

    def _prompts(self, api: ApiClient, alphabet: list[int]) -> list[Prompt]:
        unit, chunk, block = self._geometry(api, alphabet)
        longest = min(self._longest, api.max_model_len() - NUM_ANSWER_TOKENS)
        try:
            return make_prompts(alphabet, unit, chunk, block, longest, self._seed)
        except ValueError as error:
            raise NothingToVerify(f"{error}: raise --longest, or the server's --max-model-len") from error

    def _geometry(self, api: ApiClient, alphabet: list[int]) -> tuple[int, int, int]:
        """Restore unit, chunk and block in tokens: of several connectors the largest. A first request brings them."""
        warm_up = Prompt("warm-up", tuple(alphabet[:2]), 0)
        self._say("warm up")
        self._ask(api, warm_up, f"{self._salt}-warm-up")
        metrics = api.settled_metrics()
        values = [metrics.values(name, CONNECTOR) for name in _GAUGES]
        if not all(values):
            raise NothingToVerify(
                "the server has no HybridOffloadConnector: start it with a --kv-transfer-config that names one"
            )
        unit, chunk, block = (int(max(of_connectors.values())) for of_connectors in values)
        return unit, chunk, block

    def _ask(self, api: ApiClient, prompt: Prompt, salt: str) -> Completion:
        return api.complete(
            prompt.tokens, NUM_ANSWER_TOKENS, cache_salt=salt, logprobs=NUM_CANDIDATES, return_tokens_as_token_ids=True
        )


def _loaded_bytes(metrics: Metrics) -> dict[str, int]:
    return {name: int(num_bytes) for name, num_bytes in metrics.values(_LOADED_BYTES, CONNECTOR).items()}


def _too_slow(metrics: Metrics) -> float:
    """How many offers were left because computing was expected to be faster."""
    return sum(metrics.values(_TOO_SLOW, CONNECTOR).values())
