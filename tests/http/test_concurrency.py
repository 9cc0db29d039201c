# SPDX-License-Identifier: Apache-2.0
"""Fifty requests at once on a device cache too small for them: all answered, all right, whatever was restored."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Judges
from tests.engine.bar import BAR, UNCACHED, distance
from tests.engine.client import cpu_child, disk_child, multi, prompt
from tests.engine.states import FLOAT32
from tests.http.warm_server import WarmServer
from vllm_overlay.server.api_client import ApiClient, Completion

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("rank_in_the_core")]

N = FLOAT32.block_size
NUM_REQUESTS = 50
NUM_OUTPUT_TOKENS = 16
NUM_BLOCKS = 48
"""About a tenth of what the requests need: a request takes two blocks of each of the three recurrent groups and one of
the attention group for each N tokens."""


def make_prompts() -> list[list[int]]:
    """Ten for each of five shared prefixes. Nearly half of them end just below a block's end, so that their decoding
    needs another block when there is none."""
    prompts = []
    for number in range(NUM_REQUESTS):
        prefix, position = prompt(280 + 200 * (number % 5), seed=number % 5), number // 5
        long = 2 * N - 8 - position if position < 3 else 200 + 100 * position
        wanted = [320 + 100 * position, N - 8 - position, long][number % 3]
        own = max(20, wanted - len(prefix))
        prompts.append(prefix + prompt(own, seed=100 + number))
    return prompts


def send_all(api: ApiClient, prompts: list[list[int]]) -> list[Completion]:
    """Together; each from a thread of its own."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda tokens: api.complete(tokens, NUM_OUTPUT_TOKENS), prompts))


def test_fifty_requests_at_once_are_answered_right(tiny_model: Path, tmp_path: Path, judges: Judges) -> None:
    prompts = make_prompts()
    server = WarmServer(
        tiny_model,
        multi(cpu_child(), disk_child(tmp_path / "root")),
        log_path=tmp_path / "server.log",
        arguments=[
            *FLOAT32.flags,
            *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-batched-tokens", str(2 * N)),
        ],
    )
    with server as api:
        answers = send_all(api, prompts)
        api.wait_for_stores()
        api.reset_prefix_cache()
        answers += send_all(api, prompts)
        metrics = api.wait_for_stores()
    assert metrics.value("vllm:num_preemptions_total") > 0
    assert metrics.value("vllm:hybrid_offload_restored_tokens_total") > 0
    assert metrics.value("vllm:external_prefix_cache_hits_total") > 0
    assert metrics.value("vllm:hybrid_offload_hook_errors_total") == 0
    assert all(len(answer.token_ids) == NUM_OUTPUT_TOKENS for answer in answers)

    distinct = {
        (tuple(tokens), tuple(answer.token_ids), tuple(answer.logprobs)): answer
        for tokens, answer in zip(2 * prompts, answers, strict=True)
    }
    reference = judges(FLOAT32, UNCACHED)
    for (tokens, *_), answer in distinct.items():
        assert distance(reference, list(tokens), answer) <= BAR
    output = answers[0].token_ids
    wrong = [*output[:8], (output[8] + 1) % 256, *output[9:]]
    assert distance(reference, prompts[0], replace(answers[0], token_ids=wrong)) > BAR
