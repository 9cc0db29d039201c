# SPDX-License-Identifier: Apache-2.0
"""Who follows README's first page alone has a server that restores a repeated prompt after three commands."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from devtools.docs.page import Page
from tests.http.walk import SERVER, Walk, steps
from tests.python_path import REPOSITORY
from tools.server_process import hold_port, port_of
from vllm_overlay.server.api_client import ApiClient
from vllm_overlay.versions import PACKAGE

PAGE = Page.read(REPOSITORY, REPOSITORY / "README.md")
INSTALL, PATCH = "pip install .", "python tools/apply_patches.py --installed"
WITH_THE_ANSWER_IN_IT = "--enforce-eager --enable-prompt-tokens-details"
"""Flags of vLLM's that the test adds: each answer says how much was cached."""
PROMPT = "A prompt that is asked twice. " * 60


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a short name, because the server keeps sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="page-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def commands() -> list[str]:
    """Of the page's first block, which is all that a reader types."""
    return next(iter(steps(PAGE))).commands.splitlines()


@pytest.mark.engine
def test_a_repeated_prompt_is_restored_after_the_three_commands_of_the_first_page(
    directory: Path, tiny_model: Path
) -> None:
    """The package and the series are here already: what the first two leave is asked for, and the third is run."""
    install, patch, serve = commands()
    assert (install, patch) == (INSTALL, PATCH)
    assert version("vllm-overlay") == PACKAGE
    with hold_port() as holder:
        port = port_of(holder)
        here = {
            "MODEL": f"{tiny_model} --port {port} {WITH_THE_ANSWER_IN_IT}",
            "32GiB": "64MiB",
            "/var/cache": str(directory),
        }
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "TMPDIR": str(directory),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        with Walk(directory, here, environment) as walk:
            walk.take(replace(next(iter(steps(PAGE))), commands=serve))
            api = ApiClient(f"http://127.0.0.1:{port}")
            first = api.complete(PROMPT)
            api.wait_for_stores()
            api.reset_prefix_cache()
            second = api.complete(PROMPT)
            metrics = api.settled_metrics()
    restored = (first.num_prompt_tokens - 1) // 64 * 64
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, restored)
    assert second.same_as(first)
    assert metrics.values("vllm:hybrid_offload_restored_tokens_total", "connector")["cpu"] == restored
    log = (directory / "server.log").read_text()
    assert re.search(rf"warning: --disk: {directory}/vllm-kv holds at most \w+ of capacity_bytes=1TiB", log)
    assert log.index("warning: --disk") < log.index("-m vllm.entrypoints.openai.api_server")


def test_the_first_page_serves_with_one_command() -> None:
    assert [SERVER in command for command in commands()] == [False, False, True]
