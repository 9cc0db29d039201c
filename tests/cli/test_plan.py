# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay plan``: exit statuses, one JSON object, text with and without a terminal.

vLLM is not asked here: tests/planning/test_dry_start.py does that.
"""

import json
import shlex
import sys
from dataclasses import replace

import pytest

from tests.cli.commands import refused, run
from tests.planning.layouts import LLAMA, QWEN_35B, QWEN_35B_EXACT
from vllm_overlay import cli
from vllm_overlay.planning.question import Flags, Reply

MODEL = "/models/Qwen3.5-35B-A3B"
TIERS = ("--cpu", "32GiB", "--disk", "/mnt/kv:1TiB")


@pytest.fixture
def answer(monkeypatch):
    """Call it with what vLLM is to answer."""
    monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda: 64 << 30)
    monkeypatch.setattr("vllm_overlay.planning.plan.volume_bytes", lambda root: (2 << 40, 2 << 40))
    return lambda layout, **flags: monkeypatch.setattr(
        "vllm_overlay.planning.plan.ask_vllm", lambda question: Reply(Flags(model=MODEL, **flags), layout)
    )


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
    assert (status, [item["setting"] for item in plan["advice"]]) == (1, ["--prefix-match-unit", "--cpu"])


def test_the_text_says_who_was_asked_and_ends_with_the_command(answer, capsys):
    answer(QWEN_35B)
    assert cli.main(["plan", MODEL, *TIERS]) == 1
    text = capsys.readouterr().out
    assert [" ".join(line.split()) for line in text.partition("\n\n")[0].splitlines()] == [
        f"model {MODEL}",
        "asked vLLM 0.32.0 on this machine (cpu)",
        "block size N 1056 tokens",
        "match unit 48 tokens",
        "KV cache groups 2, of bfloat16",
        "states 61.4 MiB a rank, float32",
        "tokens a step 8192",
        "longest request 262144 tokens",
    ]
    assert "restores are not bit-exact with GDN kernels" in text
    assert "conversations of 8000" in text
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert shlex.split(text.splitlines()[-1])[:4] == command
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
    ("flags", "sentence"),
    [
        ({"prefix_match_unit": 64}, "must divide every attention block size, here 1056: 48 does"),
        ({"prefix_cache_retention_interval": 1000}, "must be a multiple of the block size 1056: 1056 is"),
    ],
)
def test_flags_of_vllms_that_cannot_work_are_refused_with_a_sentence(answer, capsys, flags, sentence):
    answer(QWEN_35B, **flags)
    assert sentence in refused(capsys, "plan", MODEL, *TIERS)


def test_a_match_unit_for_a_model_of_one_group_is_refused(answer, capsys):
    answer(LLAMA, prefix_match_unit=8)
    assert "leave it out, and set --block-size 8" in refused(capsys, "plan", MODEL, *TIERS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--cpu", "60MiB"), "of the CPU tier is smaller than one snapshot and its attention"),
        (("--disk", "/mnt/kv:100MiB"), "of the disk tier cannot hold two of the largest objects"),
        (("--disk", "1TiB"), "--disk='1TiB' has no path: write it before the size, such as /var/cache/vllm-kv:1TiB"),
        (("--disk", ":1TiB"), "--disk=':1TiB' has no path: write it before the size, such as /var/cache/vllm-kv:1TiB"),
        (("--cpu", "much"), "--cpu='much' is not a size: give bytes or a string such as \"4 GiB\""),
        (("--cpu", ""), "--cpu='' is not a size"),
        (("--cpu", "1GiB", "--cpu", "2GiB"), "--cpu is there 2 times: 1GiB and 2GiB. Give it once"),
        (("--disk", "/mnt/kv:much"), "'much', is no size: write /mnt/kv:1TiB, or /mnt/kv:much:1TiB where the colon"),
        (("--disk", "/mnt/kv:"), "'', is no size: write /mnt/kv:1TiB, or"),
        (("--disk", "kv:1TiB"), "--disk='kv' depends on the directory that the server is started in: set it"),
        (("--disk", "s3://kv:1TiB"), "is a URL, and this is a path: set it to an absolute path such as '/var/cache/"),
        (("--turns", "0"), "--conversation-tokens and --turns must be at least 1"),
        ((), "there is no tier: give --cpu 32GiB, --disk /var/cache/vllm-kv:1TiB or both"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(answer, capsys, arguments, sentence):
    answer(QWEN_35B)
    assert sentence in refused(capsys, "plan", MODEL, *arguments)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("/mnt/kv:1TiB", {"root": "/mnt/kv", "capacity_bytes": "1TiB"}),
        ("/mnt/kv:60Gi", {"root": "/mnt/kv", "capacity_bytes": "60Gi"}),
        ("/mnt/a:b:1 TB", {"root": "/mnt/a:b", "capacity_bytes": "1 TB"}),
        ("/mnt/kv", {"root": "/mnt/kv"}),
    ],
)
def test_a_disk_is_a_path_and_a_size_which_may_be_left_out(answer, capsys, given, taken):
    answer(QWEN_35B)
    _, plan = run(capsys, "plan", MODEL, "--disk", given)
    (child,) = plan["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert child["kv_connector_extra_config"] == {"tier": "disk", **taken}


def test_every_other_flag_is_in_the_command_in_its_order(answer, capsys):
    answer(QWEN_35B)
    mine = shlex.split(
        """--served-model-name m -tp 2 --override-generation-config '{"top_k": -1}' --max_model_len=8k"""
    )
    _, plan = run(capsys, "plan", "--cpu=8GiB", MODEL, *mine)
    assert plan["command"][3 : 5 + len(mine)] == ["--model", MODEL, *mine]
    _, plan = run(capsys, "plan", "--config", "server.yaml", "--cpu=8GiB")
    assert plan["command"][3:5] == ["--config", "server.yaml"]


def test_a_volume_that_is_too_small_is_said_with_what_it_can_have(answer, capsys, monkeypatch):
    answer(QWEN_35B_EXACT)
    monkeypatch.setattr("vllm_overlay.planning.plan.volume_bytes", lambda root: (100 << 30, 100 << 30))
    assert cli.main(["plan", MODEL, *TIERS]) == 1
    holds = "/mnt/kv holds at most 99GiB of capacity_bytes=1TiB: its file system has 100GiB"
    assert f"warning: --disk: {holds}" in capsys.readouterr().out
