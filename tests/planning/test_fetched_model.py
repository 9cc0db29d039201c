# SPDX-License-Identifier: Apache-2.0
"""A model that is not here: ``serve`` has its configuration fetched as vLLM would, ``plan`` asks no network."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.python_path import run_python

pytestmark = pytest.mark.slow
CONFIG = b"{}"
_REQUIRE = """
import sys
from vllm_overlay.dry_start import _require_configuration
_require_configuration(sys.argv[1], None, may_fetch=sys.argv[2] == "True")
"""


class Hub(BaseHTTPRequestHandler):
    """Has one model."""

    def do_HEAD(self) -> None:
        is_there = self.path == "/some/model/resolve/main/config.json"
        self.send_response(200 if is_there else 404)
        self.send_header("Content-Length", str(len(CONFIG)))
        if is_there:
            self.send_header("ETag", '"1234"')
            self.send_header("X-Repo-Commit", "0" * 40)
        else:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(CONFIG)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("model", "may_fetch", "refusal"),
    [
        ("some/model", True, ""),
        ("some/model", False, "nor in the local cache of transformers: give such a directory, or load it once with"),
        ("nobody/nothing", True, "nor in the local cache of transformers, and could not be fetched (404"),
    ],
)
def test_a_model_is_fetched_where_that_is_allowed(
    endpoint: str, tmp_path: Path, model: str, may_fetch: bool, refusal: str
) -> None:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    done = run_python("-c", _REQUIRE, model, may_fetch, env=environment)
    assert (done.returncode != 0) == bool(refusal), done.stderr
    assert refusal in done.stderr
    assert bool(list(tmp_path.rglob("config.json"))) == (not refusal)
