# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay plan``: exit statuses, one JSON object, text without a terminal, and what it may import."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import REPOSITORY, WITHOUT_VLLM, run
from tests.planning.models import LLAMA, QWEN_0_8B, QWEN_35B, write_config
from vllm_overlay import cli

TIERS = ("--cpu", "32GiB", "--disk", "/mnt/kv:1TiB", "--platform", "cuda")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config(tmp_path / "model", QWEN_35B)


def refused(capsys, *arguments) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_the_json_has_everything(model, capsys):
    status, plan = run(capsys, "plan", model, *TIERS, "--block-size", 1088, "--max-num-batched-tokens", 8192)
    assert status == 1
    assert [item["setting"] for item in plan["advice"] if item["severity"] == "warning"] == ["--platform"]
    assert plan["layout"]["block_size"] == 1088 and "by formula" in plan["layout"]["origin"]
    assert plan["match_unit"] == 64
    assert [tier["name"] for tier in plan["tiers"]] == ["cpu", "disk"]
    assert shlex.split(plan["shell_line"]) == plan["command"]
    assert json.loads(plan["command"][-1]) == plan["kv_transfer_config"]


def test_without_a_warning_the_status_is_0(model, capsys, monkeypatch):
    monkeypatch.setattr("vllm_overlay.planning.plan.has_vllm", lambda: False)
    monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda: 8 << 30)
    arguments = (model, "--cpu", "8GiB", "--block-size", 1088, "--max-num-batched-tokens", 8192)
    status, plan = run(capsys, "plan", *arguments)
    assert (status, [item["severity"] for item in plan["advice"]]) == (0, ["note"])
    assert "by formula for cpu" in plan["layout"]["origin"]
    monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda: (8 << 30) - 1)
    status, plan = run(capsys, "plan", *arguments)
    assert (status, [item["setting"] for item in plan["advice"]]) == (1, ["--prefix-match-unit", "capacity_bytes"])


def test_the_text_names_what_was_found_out_and_ends_with_the_command(model, capsys):
    assert cli.main(["plan", str(model), *TIERS]) == 1
    text = capsys.readouterr().out
    assert "1056 tokens, by formula for cuda" in text
    assert "restores are not bit-exact with GDN kernels" in text
    assert "conversations of 8000" in text
    assert shlex.split(text.splitlines()[-1])[:2] == ["python", "-m"]
    assert text.isprintable() or all(char.isprintable() or char == "\n" for char in text)


def test_a_terminal_gets_tables_with_the_same_numbers(model, capsys, monkeypatch):
    cli.main(["plan", str(model), *TIERS])
    plain = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["plan", str(model), *TIERS])
    table = capsys.readouterr().out
    assert "│" in table and "│" not in plain
    row = next(line for line in plain.splitlines() if line.startswith("disk  "))
    assert all(word in table for word in row.split())


def test_without_rich_a_terminal_gets_text(model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert cli.main(["plan", str(model), *TIERS]) == 1
    assert "│" not in capsys.readouterr().out


def test_it_needs_neither_torch_nor_vllm(model):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM, "plan", str(model), *TIERS], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "1056 tokens" in done.stdout


@pytest.mark.parametrize(
    ("config", "arguments", "sentence"),
    [
        (QWEN_35B, ("--prefix-match-unit", "64"), "must divide every attention block size, here 1056: 48 does"),
        (QWEN_35B, ("--prefix-match-unit", "0"), "--prefix-match-unit 0 must be a whole number of at least 1"),
        (QWEN_35B, ("--prefix-cache-retention-interval", "1000"), "must be a multiple of the block size 1056: 1056 is"),
        (QWEN_35B, ("--cpu", "60MiB"), "of the CPU tier is smaller than one snapshot and its attention"),
        (QWEN_35B, ("--disk", "/mnt/kv:100MiB"), "of the disk tier cannot hold two of the largest objects"),
        (QWEN_35B, ("--disk", "1TiB"), "--disk '1TiB' must be a root and a size, such as /mnt/kv:1TiB"),
        (QWEN_35B, ("--cpu", "much"), "capacity_bytes='much' is not a size"),
        (QWEN_35B, ("--turns", "0"), "--conversation-tokens and --turns must be at least 1"),
        (LLAMA, ("--prefix-match-unit", "8"), "leave it out, and set --block-size 8"),
        ({"model_type": "jamba"}, (), "does not know models of type 'jamba'"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(tmp_path, capsys, config, arguments, sentence):
    model = write_config(tmp_path / "refused", config)
    assert sentence in refused(capsys, model, *TIERS, *arguments)


def test_a_model_that_is_nowhere_is_refused(tmp_path, capsys, monkeypatch):
    assert "is neither a directory nor in the local cache" in refused(capsys, "nobody/nothing", *TIERS)
    assert "no such" in refused(capsys, tmp_path, *TIERS).lower()
    (tmp_path / "config.json").write_text("[]")
    assert "it must be a JSON object" in refused(capsys, tmp_path, *TIERS)


def test_a_name_in_the_local_cache_is_found(tmp_path, capsys, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    write_config(snapshot, QWEN_0_8B)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    _, plan = run(capsys, "plan", "some/model", *TIERS)
    assert plan["layout"]["block_size"] == 544


def test_no_tier_is_wrong_usage(model, capsys):
    assert "give --cpu 32GiB, --disk /mnt/kv:1TiB or both" in refused(capsys, model, "--platform", "cuda")
