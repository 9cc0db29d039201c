# SPDX-License-Identifier: Apache-2.0
"""What we say to vLLM's OpenAI-compatible server over HTTP, and what it answers."""

import contextlib
import json
import math
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from vllm_overlay.metrics import CONNECTOR

REQUEST_TIMEOUT_S = 600.0
"""Without a byte from the server."""
HEALTH_TIMEOUT_S = 60.0
"""Where nobody listens, the answer comes at once."""
SETTLE_TIMEOUT_S = 240.0
"""For what takes moments, unless the machine is busy with other things."""
_POLL_S = 0.05
_SHOWN = 500
"""Characters of an answer that is not the one asked for."""
_RESET = "/reset_prefix_cache"
_FINISHED = "vllm:request_success_total"
_PENDING_STORES = "vllm:hybrid_offload_pending_stores"
_T = TypeVar("_T")


class ApiError(RuntimeError):
    """No server answers, or it did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request answered. ``num_cached_tokens`` is the server's usage: device and external hits. ``candidates``
    holds, for each token, the logprobs of the most likely ones by id, as far as they were asked for."""

    token_ids: list[int]
    logprobs: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int
    seconds_to_first_token: float
    candidates: list[dict[int, float]] = field(default_factory=list)

    def same_as(self, other: "Completion") -> bool:
        """Equal tokens with exactly equal logprobs (NaN is never equal)."""
        if self.token_ids != other.token_ids:
            return False
        return all(mine == theirs for mine, theirs in zip(self.logprobs, other.logprobs, strict=True))


class Metrics:
    """One answer of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._samples: list[Sample] = []
        self.kinds: dict[str, str] = {}
        """Of each metric, by its name without a suffix: counter, gauge, histogram."""
        self.labels: dict[str, set[str]] = {}
        """The labels of each metric; of a histogram its buckets' ``le`` too."""
        for family in text_string_to_metric_families(text):
            self._samples += family.samples
            self.kinds[family.name] = family.type
            self.labels[family.name] = {label for sample in family.samples for label in sample.labels}

    def values(self, name: str, label: str) -> dict[str, float]:
        """Of one metric, by one of its labels; a counter's name ends in ``_total``."""
        found: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name:
                key = sample.labels.get(label, "")
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        """The sum over all samples of one metric that carry ``labels``; 0 when there is none yet."""
        return math.fsum(sample.value for sample in self.samples(name, **labels))

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """All samples of one metric that carry ``labels``, of several engines too."""
        return [one for one in self._samples if one.name == name and labels.items() <= one.labels.items()]


class ApiClient:
    """One server's client. Methods may be called from several threads, and raise ApiError.

    ``url`` is the server's, such as ``http://127.0.0.1:8000``. ``model`` is the name in requests; "" asks the server
    for the one it serves. As vLLM does, it takes a key from VLLM_API_KEY.
    """

    def __init__(self, url: str, model: str = "") -> None:
        try:
            base = httpx.URL(url if "//" in url else f"http://{url}")
        except httpx.InvalidURL:
            base = httpx.URL("")
        if base.scheme not in ("http", "https") or not base.host:
            raise ApiError(f"{url!r} is no URL of a server: give one such as http://127.0.0.1:8000")
        key = os.environ.get("VLLM_API_KEY", "")
        if not re.fullmatch("([ -~]*[!-~])?", key):
            raise ApiError(
                "VLLM_API_KEY holds a character that HTTP cannot send, such as a line's end, or ends in a blank: "
                "set it to ASCII alone"
            )
        self._http = httpx.Client(
            base_url=base.copy_with(path=base.path.rstrip("/").removesuffix("/v1").removesuffix("/metrics")),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=REQUEST_TIMEOUT_S,
            # A connection of its own for each request: the server closes idle ones when it likes.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # The machine's certificates. No proxy: it would be asked for this machine's own servers too.
            verify=ssl.create_default_context(),
            trust_env=False,
        )
        self._model = model
        self._lock = threading.Lock()
        self._num_answered = 0

    def is_healthy(self) -> bool:
        """Whether the server answers."""
        try:
            return self._http.get("/health", timeout=HEALTH_TIMEOUT_S).is_success
        except httpx.HTTPError:
            return False

    @property
    def model(self) -> str:
        """The name in requests."""
        if not self._model:
            (self._model, *_), _ = self._models()
        return self._model

    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer."""
        names, num_tokens = self._models()
        if self.model not in names:
            raise ApiError(f"the server does not serve {self.model!r}; it serves {', '.join(names)}")
        return num_tokens

    def _models(self) -> tuple[list[str], int]:
        """The names that it serves, and ``max_model_len`` of the first. Adapters come last, and have none of their
        own."""
        path = "/v1/models"
        with _asking(path):
            models = self._json("GET", path)["data"]
            return [model["id"] for model in models], int(models[0]["max_model_len"])

    def tokenize(self, text: str) -> list[int]:
        """The server's own tokens of ``text``, without special ones."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        path = "/tokenize"
        with _asking(path):
            return [int(token) for token in self._json("POST", path, body)["tokens"]]

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int = 8, *, engine: int | None = None, **options: Any
    ) -> Completion:
        """Greedy completion with logprobs. ``options`` go into the request. ``engine`` is the data-parallel rank that
        is to answer; without one the server chooses."""
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        path = "/v1/completions"
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        started = time.monotonic()
        with _asking(path), self._http.stream("POST", path, json=body, headers=headers) as response:
            if not response.is_success:
                response.read()
            completion = _read_stream(_lines(_accepted(path, response)), started)
        with self._lock:
            self._num_answered += 1
        return completion

    def reset_prefix_cache(self) -> None:
        """Empty the device cache; tiers keep what they have. The server refuses while blocks are still held."""

        def is_reset() -> bool:
            with _asking(_RESET):
                return bool(self._json("POST", _RESET)["success"])

        _wait_for(is_reset, lambda: "the device cache could not be reset: blocks are still held")

    def metrics(self) -> Metrics:
        """As they are; see ``settled_metrics``."""
        path = "/metrics"
        with _asking(path):
            metrics = Metrics(_accepted(path, self._http.get(path)).text)
        if not any(name.startswith("vllm:") for name in metrics.kinds):
            raise ApiError(f"{path} has nothing of vLLM: start the server without --disable-log-stats")
        return metrics

    def settled_metrics(self) -> Metrics:
        """Metrics that count every request that this client has had answered.

        The server hands out a request's last token before it counts the step that made it. What the connectors report
        of a step is counted together with the requests that finished in it.
        """

        def settled() -> Metrics | None:
            metrics = self.metrics()
            return metrics if metrics.value(_FINISHED) >= self._num_answered else None

        return _wait_for(settled, lambda: "the server has not counted its requests")

    def wait_for_stores(self) -> Metrics:
        """Returns once no store of an answered request is pending.

        Stores are planned in the steps of a request, so the gauges of its last step know of all of them; and while
        one is pending the engine goes on stepping and reporting.
        """
        pending: dict[str, float] = {}

        def stored() -> Metrics | None:
            nonlocal pending
            metrics = self.settled_metrics()
            pending = metrics.values(_PENDING_STORES, CONNECTOR)
            return metrics if pending and not any(pending.values()) else None

        return _wait_for(stored, lambda: f"stores are still pending: {pending or 'none was reported'}")

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        return _accepted(path, self._http.request(method, path, json=body)).json()


@contextlib.contextmanager
def _asking(path: str) -> Iterator[None]:
    """Raises ApiError where no server answers, or something else than vLLM's."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ApiError(f"{error.request.url} was not answered: {error or type(error).__name__}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ApiError(f"{path} answered what vLLM's server does not: {error!r}") from error


def _accepted(path: str, response: httpx.Response) -> httpx.Response:
    if not response.is_success:
        hint = " (VLLM_SERVER_DEV_MODE=1 offers it)" if path == _RESET else ""
        raise ApiError(f"{path} answered {response.status_code}{hint}: {response.text[:_SHOWN]}")
    return response


def _wait_for(look: Callable[[], _T | None], failure: Callable[[], str]) -> _T:
    """What ``look`` returns once that is true."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while not (found := look()):
        if time.monotonic() > deadline:
            raise ApiError(f"after {SETTLE_TIMEOUT_S:.0f} s {failure()}")
        time.sleep(_POLL_S)
    return found


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """httpx's own lines end at Unicode's separators too, which a token may have."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


def _read_stream(lines: Iterable[bytes], started: float) -> Completion:
    token_ids: list[int] = []
    logprobs: list[float] = []
    candidates: list[dict[int, float]] = []
    first_token_s = 0.0
    usage: dict[str, Any] | None = None
    for line in lines:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ApiError(f"/v1/completions broke off: {chunk['error']}")
        for choice in chunk["choices"]:
            first_token_s = first_token_s or time.monotonic() - started
            token_ids += choice["token_ids"]
            logprobs += map(_number, choice["logprobs"]["token_logprobs"])
            candidates += map(_by_id, choice["logprobs"].get("top_logprobs") or [])
        usage = chunk.get("usage") or usage
    if usage is None:
        raise ApiError("/v1/completions broke off: the answer ended without its usage")
    if not (details := usage.get("prompt_tokens_details")):
        raise ApiError(
            "/v1/completions does not say how many tokens were cached: start the server with "
            "--enable-prompt-tokens-details"
        )
    cached = details["cached_tokens"]
    return Completion(token_ids, logprobs, usage["prompt_tokens"], cached, first_token_s, candidates)


def _number(logprob: float | None) -> float:
    """JSON has no NaN: the server writes null."""
    return math.nan if logprob is None else logprob


def _by_id(likely: dict[str, float | None] | None) -> dict[int, float]:
    """Tokens that the server wrote as ``token_id:17``; others are left out."""
    named = {token.removeprefix("token_id:"): _number(logprob) for token, logprob in (likely or {}).items()}
    return {int(token): logprob for token, logprob in named.items() if token.isdigit()}
