# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay plan``: exit statuses, one JSON object, text with and without a terminal.

vLLM is not asked here: tests/planning/test_dry_start.py does that.
"""

import json
import shlex
from dataclasses import replace

import pytest

from tests.cli.commands import run
from tests.planning.layouts import LLAMA, QWEN_35B, QWEN_35B_EXACT
from vllm_overlay import cli
from vllm_overlay.planning import ask_vllm

MODEL = "/models/Qwen3.5-35B-A3B"
TIERS = ("--cpu", "32GiB", "--disk", "/mnt/kv:1TiB")


@pytest.fixture
def answer(monkeypatch):
    """Call it with what vLLM is to answer."""
    monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda: 64 << 30)
    return lambda layout: monkeypatch.setattr("vllm_overlay.planning.plan.ask_vllm", lambda question: layout)


def refused(capsys, *arguments) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_the_json_has_everything(answer, capsys):
    answer(replace(QWEN_35B_EXACT, platform="cuda"))
    status, plan = run(capsys, "plan", MODEL, *TIERS, "--block-size", 1088, "--max-num-batched-tokens", 8192)
    assert status == 1
    assert [item["setting"] for item in plan["advice"] if item["severity"] == "warning"] == ["vLLM's platform"]
    assert plan["layout"]["block_size"] == 1088 and plan["layout"]["vllm"] == "0.32.0"
    assert plan["match_unit"] == 64
    assert [tier["name"] for tier in plan["tiers"]] == ["cpu", "disk"]
    assert shlex.split(plan["shell_line"]) == plan["command"]
    assert json.loads(plan["command"][-1]) == plan["kv_transfer_config"]


def test_without_a_warning_the_status_is_0(answer, capsys, monkeypatch):
    answer(QWEN_35B_EXACT)
    monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda: 8 << 30)
    status, plan = run(capsys, "plan", MODEL, "--cpu", "8GiB")
    assert (status, [item["severity"] for item in plan["advice"]]) == (0, ["note"])
    monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda: (8 << 30) - 1)
    status, plan = run(capsys, "plan", MODEL, "--cpu", "8GiB")
    assert (status, [item["setting"] for item in plan["advice"]]) == (1, ["--prefix-match-unit", "capacity_bytes"])


def test_the_text_says_who_was_asked_and_ends_with_the_command(answer, capsys):
    answer(QWEN_35B)
    assert cli.main(["plan", MODEL, *TIERS]) == 1
    text = capsys.readouterr().out
    assert "vLLM 0.32.0 on this machine (cpu)" in text and "1056 tokens" in text
    assert "restores are not bit-exact with GDN kernels" in text
    assert "conversations of 8000" in text
    assert shlex.split(text.splitlines()[-1])[:2] == ["python", "-m"]
    assert all(char.isprintable() or char == "\n" for char in text)


def test_a_terminal_gets_tables_with_the_same_numbers(answer, capsys, monkeypatch):
    answer(QWEN_35B)
    cli.main(["plan", MODEL, *TIERS])
    plain = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["plan", MODEL, *TIERS])
    table = capsys.readouterr().out
    assert "│" in table and "│" not in plain
    row = next(line for line in plain.splitlines() if line.startswith("disk  "))
    assert all(word in table for word in row.split())


@pytest.mark.parametrize(
    ("layout", "arguments", "sentence"),
    [
        (QWEN_35B, ("--prefix-match-unit", "64"), "must divide every attention block size, here 1056: 48 does"),
        (QWEN_35B, ("--prefix-cache-retention-interval", "1000"), "must be a multiple of the block size 1056: 1056 is"),
        (QWEN_35B, ("--cpu", "60MiB"), "of the CPU tier is smaller than one snapshot and its attention"),
        (QWEN_35B, ("--disk", "/mnt/kv:100MiB"), "of the disk tier cannot hold two of the largest objects"),
        (QWEN_35B, ("--disk", "1TiB"), "--disk '1TiB' must be a root and a size, such as /mnt/kv:1TiB"),
        (QWEN_35B, ("--cpu", "much"), "--cpu='much' is not a size: give bytes or a string such as \"4 GiB\""),
        (QWEN_35B, ("--cpu", ""), "--cpu='' is not a size"),
        (QWEN_35B, ("--disk", "/mnt/kv:much"), "the size in --disk='much' is not a size"),
        (
            QWEN_35B,
            ("--disk", "kv:1TiB"),
            "the root in --disk='kv' depends on the directory that the server is started in: set it",
        ),
        (
            QWEN_35B,
            ("--disk", "s3://kv:1TiB"),
            "is a URL, and this is a path: set it to an absolute path such as '/mnt/kv'",
        ),
        (QWEN_35B, ("--turns", "0"), "--conversation-tokens and --turns must be at least 1"),
        (LLAMA, ("--prefix-match-unit", "8"), "leave it out, and set --block-size 8"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(answer, capsys, layout, arguments, sentence):
    answer(layout)
    assert sentence in refused(capsys, MODEL, *TIERS, *arguments)


def test_no_tier_is_wrong_usage(capsys):
    assert "give --cpu 32GiB, --disk /mnt/kv:1TiB or both" in refused(capsys, MODEL)


def test_a_model_that_is_nowhere_is_refused_before_vllm_is_asked(tmp_path, capsys):
    sentence = "is neither a directory with a config.json nor in the local cache of transformers"
    for nowhere in ("nobody/nothing", "/nowhere", "no/such/name", tmp_path):
        assert sentence in refused(capsys, nowhere, *TIERS)


def test_a_name_in_the_local_cache_is_found(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    ask_vllm._require_configuration("some/model")
