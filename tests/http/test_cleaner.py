# SPDX-License-Identifier: Apache-2.0
"""One server on a disk tier: ``probe`` says why nothing is restored, and a cleaner removes all files below its root."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.client import disk_child, prompt
from tests.engine.states import FLOAT32
from tests.http.warm_server import WarmServer
from tests.waiting import until
from vllm_overlay import cli
from vllm_overlay.cli.causes import cause
from vllm_overlay.server.api_client import ApiClient, Completion
from vllm_overlay.server.interval import Interval

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("rank_in_the_core")]

BLOCK = FLOAT32.block_size
WITHOUT_A_MATCH_UNIT = ["--prefix-match-unit", str(BLOCK)]
"""What vLLM takes where none is given. That of ``Server`` is finer."""


def test_a_server_says_why_it_restores_nothing_and_begins_anew_after_a_cleaner(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, log = tmp_path / "root", tmp_path / "server.log"
    server = WarmServer(
        tiny_model,
        disk_child(root, hybrid_chunk_size="auto"),
        log_path=log,
        arguments=[*FLOAT32.flags, *WITHOUT_A_MATCH_UNIT],
    )
    with server as api:

        def probed() -> tuple[int, dict[str, Any]]:
            status = cli.main(["probe", server.url, "--json"])
            return status, msgspec.json.decode(capsys.readouterr().out)

        api.complete(prompt(BLOCK // 2, seed=1))
        assert_cause(api, f"the prompts are shorter than {BLOCK} tokens", "set --prefix-match-unit 64")
        first = prompt(BLOCK + 100, seed=2)
        cold = api.complete(first)
        api.wait_for_stores()
        assert_cause(api, "no prompt has come a second time", "cache_salt")
        assert api.complete(first).same_as(cold)
        assert_cause(api, "still in vLLM's own cache (1,152 tokens)")
        restored(api, first, cold)
        status, found = probed()
        assert (status, found["cause"]) == (0, "")

        subprocess.run(["find", root, "-ignore_readdir_race", "-type", "f", "-delete"], check=True)
        api.reset_prefix_cache()
        again = api.complete(first)
        assert again.same_as(cold) and again.num_cached_tokens == 0
        until(lambda: "was removed or replaced, and begins anew" in log.read_text(), "a word of it")
        seeds = iter(range(100, 1000))

        def is_stored() -> bool:
            """A store may fall into the time in which the root is made anew."""
            tokens = prompt(BLOCK + 100, next(seeds))
            cold = api.complete(tokens)
            api.wait_for_stores()
            api.reset_prefix_cache()
            answer = api.complete(tokens)
            assert answer.same_as(cold)
            return answer.num_cached_tokens == BLOCK

        until(is_stored, "a store that is restored")
        api.reset_prefix_cache()
        assert api.complete(first).same_as(cold)
        restored(api, first, cold)
        status, found = probed()
        assert (status, found["tiers"][0]["capacity"]) == (0, "1.0 GiB")
    assert log.read_text().count("was removed or replaced") == 1  # within a minute


def restored(api: ApiClient, tokens: list[int], cold: Completion) -> None:
    api.wait_for_stores()
    api.reset_prefix_cache()
    answer = api.complete(tokens)
    assert answer.same_as(cold)
    assert answer.num_cached_tokens == BLOCK


def assert_cause(api: ApiClient, *words: str) -> None:
    found = cause(Interval(None, api.settled_metrics()))
    assert [word for word in words if word not in found] == [], found
