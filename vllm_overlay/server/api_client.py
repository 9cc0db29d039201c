# SPDX-License-Identifier: Apache-2.0
"""What we say to vLLM's OpenAI-compatible server, over HTTP with the standard library."""

import http.client
import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

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
_FINISHED = "vllm:request_success_total"
_PENDING_STORES = "vllm:hybrid_offload_pending_stores"


class ApiError(RuntimeError):
    """The server did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request answered. ``num_cached_tokens`` is the server's usage: device and external hits.

    ``candidates`` holds, for each token, the logprobs of the most likely ones by id, as far as they were asked for.
    """

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
    """One server's client. Methods may be called from several threads.

    ``url`` is the server's, such as ``http://127.0.0.1:8000``; ValueError if it is no such thing. ``model`` is the name
    in requests; "" asks the server for the one it serves. As vLLM does, it takes a key from VLLM_API_KEY.
    """

    def __init__(self, url: str, model: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server: give one such as http://127.0.0.1:8000")
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = model
        self._lock = threading.Lock()
        self._num_answered = 0

    def is_healthy(self) -> bool:
        """Whether the server answers."""
        try:
            return self._request("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    @property
    def model(self) -> str:
        """The name in requests. Raises ApiError."""
        if not self._model:
            served = self._json("GET", "/v1/models")["data"]
            self._model = served[0]["id"]
        return self._model

    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer. Raises ApiError."""
        served = {model["id"]: model for model in self._json("GET", "/v1/models")["data"]}
        if self.model not in served:
            raise ApiError(f"the server does not serve {self.model!r}; it serves {', '.join(served)}")
        return int(served[self.model]["max_model_len"])

    def tokenize(self, text: str) -> list[int]:
        """The server's own tokens of ``text``, without special ones. Raises ApiError."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._json("POST", "/tokenize", body)["tokens"]
        return tokens

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int = 8, *, engine: int | None = None, **options: Any
    ) -> Completion:
        """Greedy completion with logprobs. ``options`` go into the request. Raises ApiError.

        ``engine`` is the data-parallel rank that is to answer; without one the server chooses.
        """
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
        connection = self._connect(REQUEST_TIMEOUT_S)
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        try:
            started = time.monotonic()
            self._send(connection, "POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ApiError(f"/v1/completions answered {response.status}: {response.read().decode()}")
            completion = _read_stream(response, started)
        finally:
            connection.close()
        with self._lock:
            self._num_answered += 1
        return completion

    def reset_prefix_cache(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Empty the device cache; tiers keep what they have. The server refuses while blocks are still held."""
        deadline = time.monotonic() + timeout_s
        while True:
            status, text = self._request("POST", "/reset_prefix_cache")
            if status != 200:
                raise ApiError(f"/reset_prefix_cache answered {status} (VLLM_SERVER_DEV_MODE=1 offers it): {text}")
            if json.loads(text)["success"]:
                return
            if time.monotonic() > deadline:
                raise ApiError(f"the device cache could not be reset in {timeout_s:.0f} s: blocks are still held")
            time.sleep(_POLL_S)

    def metrics(self) -> Metrics:
        """As they are; see ``settled_metrics``."""
        status, text = self._request("GET", "/metrics")
        if status != 200:
            raise ApiError(f"/metrics answered {status}: {text}")
        return Metrics(text)

    def settled_metrics(self, timeout_s: float = SETTLE_TIMEOUT_S) -> Metrics:
        """Metrics that count every request that this client has had answered.

        The server hands out a request's last token before it counts the step that made it. What the connectors report
        of a step is counted together with the requests that finished in it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            if metrics.value(_FINISHED) >= self._num_answered:
                return metrics
            if time.monotonic() > deadline:
                raise ApiError(f"the server has not counted its requests in {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def wait_for_stores(self, timeout_s: float = SETTLE_TIMEOUT_S) -> Metrics:
        """Returns once no store of an answered request is pending.

        Stores are planned in the steps of a request, so the gauges of its last step know of all of them; and while
        one is pending the engine goes on stepping and reporting.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.settled_metrics(timeout_s)
            pending = metrics.values(_PENDING_STORES, CONNECTOR)
            if pending and not any(pending.values()):
                return metrics
            if time.monotonic() > deadline:
                raise ApiError(f"stores are still pending after {timeout_s:.0f} s: {pending or 'none was reported'}")
            time.sleep(_POLL_S)

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        status, text = self._request(method, path, body=body)
        if status != 200:
            raise ApiError(f"{path} answered {status}: {text}")
        return json.loads(text)

    def _request(
        self, method: str, path: str, timeout_s: float = REQUEST_TIMEOUT_S, body: Any = None
    ) -> tuple[int, str]:
        connection = self._connect(timeout_s)
        try:
            self._send(connection, method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return self._connection_type(self._host, self._port, timeout=timeout_s)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        content = {} if body is None else {"Content-Type": "application/json"}
        text = None if body is None else json.dumps(body)
        connection.request(method, self._path + path, text, {**self._headers, **content, **headers})


def _read_stream(response: http.client.HTTPResponse, started: float) -> Completion:
    token_ids: list[int] = []
    logprobs: list[float] = []
    candidates: list[dict[int, float]] = []
    first_token_s = 0.0
    usage: dict[str, Any] | None = None
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ApiError(f"/v1/completions broke off: {chunk['error']}")
        for choice in chunk["choices"]:
            first_token_s = first_token_s or time.monotonic() - started
            token_ids += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
            candidates += [_by_id(likely) for likely in choice["logprobs"].get("top_logprobs") or []]
        usage = chunk.get("usage") or usage
    if usage is None:
        raise ApiError("/v1/completions broke off: the answer ended without its usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Completion(token_ids, logprobs, usage["prompt_tokens"], cached, first_token_s, candidates)


def _by_id(likely: dict[str, float] | None) -> dict[int, float]:
    """Tokens that the server wrote as ``token_id:17``; others are left out."""
    named = {token.removeprefix("token_id:"): logprob for token, logprob in (likely or {}).items()}
    return {int(token): logprob for token, logprob in named.items() if token.isdigit()}
