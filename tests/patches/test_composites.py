# SPDX-License-Identifier: Apache-2.0
"""Composite connectors of any name, and a process that only shows what their children report: patch 0011."""

import json
import os
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.config.kv_transfer import hisparse_host_pool_gib

from tests.python_path import run_python

pytestmark = pytest.mark.patches

FRONTEND = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
config, data = json.loads(sys.argv[1]), {"StatsConnector": {"loads": 1}}
if config is None:
    print(json.dumps(MultiConnector.build_kv_connector_stats(data).reduce()))
else:
    logging = KVConnectorLogging(KVTransferConfig(**config))
    logging.observe(data)
    logging.observe(data)
    print(json.dumps(logging.transfer_stats_accumulator.reduce()))
"""


def child(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def composite(name: str, *children: dict[str, Any]) -> dict[str, Any]:
    return child(name, connectors=list(children))


def shown_by_a_frontend(config: dict[str, Any] | None) -> Any:
    """What a fresh process makes of stats of a child, with the configuration of the composite or without one."""
    done = run_python("-c", FRONTEND, json.dumps(config), env={**os.environ, "VLLM_PLUGINS": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_that_knows_the_configuration_shows_the_stats_of_a_child_loaded_by_module_path() -> None:
    known = {**child("StatsConnector"), "kv_connector_module_path": "tests.patches.lab"}
    assert shown_by_a_frontend(composite("MultiConnector", known)) == {"StatsConnector": {"loads": 2}}


def test_a_process_that_was_never_asked_for_a_childs_class_passes_over_its_stats() -> None:
    assert shown_by_a_frontend(None) == {}


@pytest.mark.parametrize("name", ["MultiConnector", "WeightedMultiConnector"])
def test_a_composite_of_any_name_has_its_children(name: str) -> None:
    config = KVTransferConfig(**composite(name, child("NixlConnector"), child("HiSparseConnector", host_pool_gib=2)))
    assert all(map(config.has_connector, (name, "NixlConnector", "HiSparseConnector")))
    assert not config.has_connector("MoRIIOConnector")
    assert hisparse_host_pool_gib(config) == 2.0


@pytest.mark.parametrize(
    "connectors", [None, "NixlConnector", {"kv_connector": "NixlConnector"}, ["NixlConnector"], [{}]]
)
def test_a_setting_of_the_same_name_that_holds_no_connectors_makes_no_composite(connectors: Any) -> None:
    config = KVTransferConfig(**child("Other", connectors=connectors))
    assert config.has_connector("Other") and not config.has_connector("NixlConnector")
    assert hisparse_host_pool_gib(config) is None


def test_a_connector_alone_is_found_as_before() -> None:
    config = KVTransferConfig(**child("HiSparseConnector", host_pool_gib=3))
    assert config.has_connector("HiSparseConnector") and hisparse_host_pool_gib(config) == 3.0
