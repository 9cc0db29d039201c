# SPDX-License-Identifier: Apache-2.0
"""The command that is printed is the command that is meant, and our connector takes its configuration."""

import json

import pytest

from tests.planning.layouts import QWEN_0_8B
from vllm_overlay.multi_connector.children import child_specs
from vllm_overlay.planning.capacity import Conversation
from vllm_overlay.planning.plan import make_plan
from vllm_overlay.planning.question import Flags, Reply
from vllm_overlay.planning.server_command import server_command, transfer_config
from vllm_overlay.plugin import register
from vllm_overlay.tiers.factory import tier_spec

CHILDREN = [
    {"tier": "cpu", "capacity_bytes": "32GiB"},
    {"tier": "disk", "root": '/mnt/it\'s "mine" $5', "capacity_bytes": "1TiB"},
]


@pytest.fixture(autouse=True)
def answer(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = Reply(Flags(model="m"), QWEN_0_8B)
    monkeypatch.setattr("vllm_overlay.planning.plan.ask_vllm", lambda question: reply)


def test_the_command_has_the_given_arguments_and_the_json() -> None:
    model = "/models/a model; $(rm)"
    plan = make_plan(["--model", model, "--max-model-len", "4096"], CHILDREN, Conversation(8000))
    words = list(plan.command)
    assert words[words.index("--model") + 1] == model
    assert words[words.index("--max-model-len") + 1] == "4096"
    assert words[words.index("--prefix-match-unit") + 1] == "32"
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config == plan.kv_transfer_config
    assert [
        child["kv_connector_extra_config"] for child in config["kv_connector_extra_config"]["connectors"]
    ] == CHILDREN


def test_our_connector_takes_the_configuration() -> None:
    register()
    config = make_plan(["--model", "m"], CHILDREN, Conversation(8000)).kv_transfer_config
    specs = child_specs(config["kv_connector_extra_config"], config["kv_role"], "engine")
    assert [spec.name for spec in specs] == ["cpu", "disk"]
    assert all(spec.load_weight.is_measured for spec in specs)
    tiers = [tier_spec(spec.kv_transfer_config.kv_connector_extra_config) for spec in specs]
    assert [tier.settings.capacity_bytes for tier in tiers] == [32 << 30, 1 << 40]


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ({}, ["--enable-prefix-caching", "--prefix-match-unit", "32", "--shutdown-timeout", "10"]),
        ({"shutdown_timeout": 0, "enable_prefix_caching": True}, ["--prefix-match-unit", "32"]),
        ({"prefix_match_unit": 544}, ["--enable-prefix-caching", "--shutdown-timeout", "10"]),
    ],
)
def test_only_what_was_not_given_is_added(flags: dict[str, int], added: list[str]) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = server_command(["--model", "m"], Flags(model="m", **flags), 32, None, transfer_config(CHILDREN))
    assert command[3:-2] == ["--model", "m", *added]
    make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])
