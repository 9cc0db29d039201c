# SPDX-License-Identifier: Apache-2.0
"""A client on servers that answer rightly, wrongly or not at all; tests/http asks a real one."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_overlay.server.api_client import ApiClient, ApiError

MODELS = json.dumps({"data": [{"id": "tiny", "max_model_len": 8192}]})


class Handler(BaseHTTPRequestHandler):
    """Answers what ``server.answers`` has for a path: a status and a body."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        self.server.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))  # type: ignore[attr-defined]
        status, body = self.server.answers.get(self.path, (404, "no such page"))  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing on standard error."""


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.answers = {"/v1/models": (200, MODELS)}  # type: ignore[attr-defined]
        found.asked = []  # type: ignore[attr-defined]
        found.url = f"http://127.0.0.1:{found.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def stream(*chunks: Any) -> tuple[int, str]:
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks]
    return 200, "".join([*lines, "data: [DONE]\n\n"])


def token(number: int, logprob: float | None, text: str = "x") -> dict[str, Any]:
    logprobs = {"token_logprobs": [logprob], "top_logprobs": [{f"token_id:{number}": logprob, "others": -1.0}]}
    return {"choices": [{"text": text, "token_ids": [number], "logprobs": logprobs}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}


def test_an_answer_is_read_as_it_comes_whatever_its_tokens_are(server: Any) -> None:
    """Lines end at a line feed alone: the text of a token may be a separator of Unicode."""
    server.answers["/v1/completions"] = stream(token(5, -0.1, "\u2028"), token(6, -2.769653081893921, "\x85"), USAGE)
    answer = ApiClient(server.url).complete([1, 2])
    assert (answer.token_ids, answer.logprobs) == ([5, 6], [-0.1, -2.769653081893921])
    assert answer.candidates == [{5: -0.1}, {6: -2.769653081893921}]
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (9, 4)


def test_what_is_asked_for_is_the_likeliest_tokens_and_as_many_as_wanted(server: Any) -> None:
    server.answers["/v1/completions"] = stream(token(7, -0.5), USAGE)
    ApiClient(server.url).complete([1, 2], 3, cache_salt="mine")
    wanted = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "cache_salt": "mine"}
    assert wanted.items() <= json.loads(server.body).items()


def test_a_logprob_that_is_no_number_is_equal_to_nothing(server: Any) -> None:
    server.answers["/v1/completions"] = stream(token(5, None), USAGE)
    answer = ApiClient(server.url).complete("x")
    assert math.isnan(answer.logprobs[0])
    assert not answer.same_as(answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, "too long"), "answered 400: too long"),
        (stream(token(5, -0.1)), "broke off: the answer ended without its usage"),
        (stream({"choices": [], "usage": {"prompt_tokens": 9}}), "does not say .*: start the server with --enable"),
        (stream({"error": {"message": "no memory"}}), "broke off: .*no memory"),
        ((200, "data: {\n"), "answered what vLLM's server does not"),
        (stream({"choices": [{"text": "x"}], "usage": None}), "answered what vLLM's server does not: KeyError"),
        (stream([]), "answered what vLLM's server does not"),
    ],
)
def test_a_failed_completion_is_an_api_error_with_the_reason(server: Any, answer: tuple[int, str], words: str) -> None:
    server.answers["/v1/completions"] = answer
    with pytest.raises(ApiError, match=f"/v1/completions {words}"):
        ApiClient(server.url).complete("x")


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"data": 3}', '{"data": []}', '{"data": [{"id": "m"}]}'])
def test_another_server_than_vllms_is_told(server: Any, body: str) -> None:
    server.answers["/v1/models"] = (200, body)
    with pytest.raises(ApiError, match="/v1/models answered what vLLM's server does not"):
        _ = ApiClient(server.url).model


def test_an_adapter_is_served_beside_its_model_and_takes_requests_as_long(server: Any) -> None:
    """vLLM says of an adapter no length of its own."""
    models = [{"id": "tiny", "max_model_len": 8192}, {"id": "adapter", "max_model_len": None, "parent": "tiny"}]
    server.answers["/v1/models"] = (200, json.dumps({"data": models}))
    api = ApiClient(server.url)
    assert (api.model, api.max_model_len()) == ("tiny", 8192)
    assert ApiClient(server.url, "adapter").max_model_len() == 8192
    with pytest.raises(ApiError, match="does not serve 'other'; it serves tiny, adapter"):
        ApiClient(server.url, "other").max_model_len()


def test_a_server_without_development_mode_is_told_what_to_set(server: Any) -> None:
    with pytest.raises(ApiError, match=r"/reset_prefix_cache answered 404 \(VLLM_SERVER_DEV_MODE=1 offers it\)"):
        ApiClient(server.url).reset_prefix_cache()


def test_a_server_that_counts_nothing_is_told_what_to_change(server: Any) -> None:
    """It would be waited for, or taken for one without connectors."""
    server.answers["/metrics"] = (200, "# TYPE python_info gauge\npython_info 1.0\n")
    for ask in (ApiClient(server.url).metrics, ApiClient(server.url).settled_metrics):
        with pytest.raises(
            ApiError, match="/metrics has nothing of vLLM: start the server without --disable-log-stats"
        ):
            ask()


def test_nobody_listens(server: Any) -> None:
    api = ApiClient("http://127.0.0.1:1")
    assert not api.is_healthy()
    with pytest.raises(ApiError, match=r"/metrics was not answered: .*refused"):
        api.metrics()


def test_a_proxy_of_the_environment_is_not_asked_and_a_key_is_sent(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    for path in ("/v1/", "/metrics"):  # as another client has it, and as Prometheus has it
        assert ApiClient(server.url + path).max_model_len() == 8192
    assert set(server.asked) == {("/v1/models", "Bearer secret")}


@pytest.mark.parametrize("key", ["clé", "secret\n", "secret "])
def test_a_key_that_no_header_can_carry_is_refused_by_its_name_alone(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ApiError, match="VLLM_API_KEY holds a character that HTTP cannot send") as refused:
        ApiClient("http://127.0.0.1:1").metrics()
    assert key.strip() not in str(refused.value)


@pytest.mark.parametrize("url", ["ftp://there", "http://", "http://[::1", "http://x:y"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ApiError, match="is no URL of a server: give one such as"):
        ApiClient(url)
