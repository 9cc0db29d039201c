# SPDX-License-Identifier: Apache-2.0
"""What a dry start answers is what a real engine has: blocks, bytes, chunks. It needs no weights."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.python_path import REPOSITORY
from vllm_overlay.planning.ask_vllm import ask_vllm
from vllm_overlay.planning.capacity import geometry_of
from vllm_overlay.planning.question import Answer, Question, Reply
from vllm_overlay.planning.server_command import transfer_config
from vllm_overlay.tiers.factory import tier_spec

pytestmark = pytest.mark.engine


@pytest.fixture
def without_weights(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's configuration alone."""
    directory = tmp_path / "configuration"
    directory.mkdir()
    shutil.copy(tiny_model / "config.json", directory)
    return directory


def reply(model: Path, *arguments: str, **tier: Any) -> Reply:
    config = transfer_config([{"tier": "cpu", **tier}])
    return ask_vllm(Question(arguments=("--model", str(model), *arguments), kv_transfer_config=config))


@pytest.mark.processor
def test_vllm_answers_without_weights_what_its_engine_has(tiny_model: Path, without_weights: Path) -> None:
    """With the dtype of states that vLLM chooses on this processor."""
    layout = reply(without_weights).layout
    with Engine(tiny_model, kv_transfer_config=multi(cpu_child(hybrid_chunk_size="auto"))) as engine:
        assert f"Setting attention block size to {layout.block_size} tokens" in engine.log
        engine.generate(prompt(100, seed=1))
        engine.wait_for_stores()
        measured = {
            name: engine.metric(f"vllm:hybrid_offload_{name}", connector="cpu")
            for name in ("block_tokens", "chunk_tokens", "restore_unit_tokens", "token_bytes", "state_bytes")
        }
    geometry = geometry_of(layout, 64, tier_spec({"tier": "cpu"}))
    assert measured == {
        "block_tokens": layout.block_size,
        "chunk_tokens": geometry.chunk_size,
        "restore_unit_tokens": geometry.restore_unit,
        "token_bytes": geometry.token_bytes,
        "state_bytes": geometry.state_bytes,
    }
    assert layout.max_model_len == 8192
    assert (layout.vllm, layout.platform) == ("0.32.0", "cpu")


@pytest.mark.engines
def test_one_process_answers_for_two_ranks(without_weights: Path) -> None:
    """Each has one of the two KV heads, and half of the states."""
    one, two = (
        reply(without_weights, "-tp", str(ranks), "--mamba-ssm-cache-dtype", "float32").layout for ranks in (1, 2)
    )
    assert one.block_size == two.block_size
    assert [2 * group.page_bytes for group in two.groups] == [group.page_bytes for group in one.groups]
    assert [2 * group.token_bytes for group in two.groups] == [group.token_bytes for group in one.groups]


REFUSALS = [
    (["--prefix-match-unit", "100"], "--prefix-match-unit 100 must divide every attention block size, here 1152"),
    (["--no-enable-prefix-caching"], "only while a request runs without the prefix cache: leave out --no-enable-pr"),
    (["--prefix-caching-hash-algo", "xxhash"], "set PYTHONHASHSEED to a fixed number or use --prefix-caching-hash-"),
    (["--max-model-len", str(1 << 20)], "vLLM cannot start: .*max_model_len"),
    (["--block-size", "0"], "vLLM cannot start: block_size: Input should be greater than 0"),
    (["--kv-cache-dtype", "float7"], "vLLM's server: argument --kv-cache-dtype: invalid choice: 'float7'"),
    (["--max-model-len", "many"], "vLLM's server: argument --max-model-len: .*'many'"),
    (["--max-modle-len", "4096"], "vLLM's server: unrecognized arguments: --max-modle-len; did you mean --max-model"),
    (["--kv-offloading-size", "1"], "--kv-offloading-size 1 would put vLLM's own connector in the place of"),
    (
        ["--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'],
        "--kv-transfer-config is made from --cpu and",
    ),
    (["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config is made from --cpu and --disk: leave it"),
    (["--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
    (["--headless"], "--headless is known to `vllm serve` alone"),
    (["--api-server-count", "2"], "--api-server-count is known to `vllm serve` alone"),
    (["--max-model-len", "4096", "GiB"], "'GiB' belongs to no flag: write the model first, and a size as one word"),
    (["--model", "/nowhere"], "/nowhere is no directory with a config.json: give the directory of the model, or its"),
    (["--model", "nobody/nothing"], "nobody/nothing is neither a directory with a config.json nor in the local cache"),
    (["--pipeline-parallel-size", "2"], "does not support pipeline parallelism yet"),
]
"""Arguments beside the model -> what is said. Later ones of vLLM's parser count."""

_ALL_IN_ONE_PROCESS = """
import sys, msgspec
from vllm_overlay.dry_start import answer
from vllm_overlay.planning.question import Question
from vllm.distributed import cleanup_dist_env_and_memory

for line in sys.stdin:
    print("ANSWER", msgspec.json.encode(answer(msgspec.json.decode(line, type=Question))).decode(), flush=True)
    cleanup_dist_env_and_memory()
"""


@pytest.fixture(scope="module")
def refusals(tiny_model: Path) -> list[str]:
    """To all rows, from one process."""
    config = transfer_config([{"tier": "cpu"}, {"tier": "disk", "root": "/tmp/kv"}])
    model = ("--model", str(tiny_model), "--mamba-ssm-cache-dtype", "float32")
    questions = [Question(arguments=(*model, *given), kv_transfer_config=config) for given, _ in REFUSALS]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONHASHSEED", None)
    done = subprocess.run(
        [sys.executable, "-c", _ALL_IN_ONE_PROCESS],
        input=b"\n".join(map(msgspec.json.encode, questions)),
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("ANSWER ")]
    return [msgspec.json.decode(line.removeprefix("ANSWER "), type=Answer).refusal for line in lines]


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[" ".join(given) for given, _ in REFUSALS])
def test_what_no_server_can_have_is_refused_in_the_words_of_who_refuses(number: int, refusals: list[str]) -> None:
    assert re.search(REFUSALS[number][1], refusals[number]), refusals[number]
