# SPDX-License-Identifier: Apache-2.0
"""The README's example is taken as it stands, and its first page stays short."""

import json
import re
from pathlib import Path

import pytest

from tests.planning.layouts import QWEN_35B
from tests.test_versions import rows_of
from vllm_overlay import cli, multi_connector
from vllm_overlay.multi_connector.children import child_specs
from vllm_overlay.planning.question import Flags, Reply
from vllm_overlay.plugin import register
from vllm_overlay.tiers.factory import tier_spec

README = Path(__file__).parents[1] / "README.md"
MOST_WORDS, MOST_ROWS = 20, 8


def example() -> str:
    """The README's ``--kv-transfer-config``, as it stands."""
    (found,) = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    return str(found)


def test_the_readmes_json_is_what_its_command_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = Reply(Flags(model="MODEL"), QWEN_35B)
    monkeypatch.setattr("vllm_overlay.planning.plan.ask_vllm", lambda question: reply)
    (command,) = re.findall(r"^vllm-overlay (serve .*)$", README.read_text(), re.MULTILINE)
    assert cli.main([*command.split(), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(example())


def test_the_readmes_example_works_and_both_families_of_metrics_call_its_children_alike() -> None:
    register()
    config = json.loads(example())
    assert config["kv_connector_module_path"] == multi_connector.__name__
    specs = child_specs(config["kv_connector_extra_config"], kv_role=config["kv_role"], engine_id=None)
    in_tiers = [tier_spec(spec.kv_transfer_config.kv_connector_extra_config).settings.name for spec in specs]
    assert [spec.name for spec in specs] == in_tiers == ["cpu", "disk"]


def test_the_first_sentence_is_short() -> None:
    first = README.read_text().split("\n\n")[1]
    assert first.startswith("**") and first.endswith(".**")
    assert len(first.split()) <= MOST_WORDS


def test_the_table_of_what_is_supported_is_short() -> None:
    assert 0 < len(rows_of(README, "What is supported?")) <= MOST_ROWS
