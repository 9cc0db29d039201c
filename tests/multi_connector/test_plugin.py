# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_plugins_by_group

from vllm_overlay import plugin
from vllm_overlay.multi_connector import MultiConnector


def test_registering_twice_is_registering_once():
    plugin.register()
    first = dict(KVConnectorFactory._registry)
    plugin.register()
    assert KVConnectorFactory._registry == first
    assert set(plugin.CONNECTORS) <= set(first)
    assert KVConnectorFactory.get_connector_class_by_name("WeightedMultiConnector") is MultiConnector


def test_a_vllm_without_secondary_tiers_starts_and_our_connectors_are_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.factory", None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    plugin.register()
    assert set(KVConnectorFactory._registry) == set(plugin.CONNECTORS)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("MultiConnector", "vllm_overlay.multi_connector"),
        ("HybridOffloadConnector", "vllm_overlay.connector.connector"),
    ],
)
def test_a_module_path_is_enough_without_our_plugin(monkeypatch, name, module):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
    found = KVConnectorFactory.get_connector_class(config)
    assert (found.__name__, found.__module__.startswith(module)) == (name, True)


@pytest.mark.parametrize(("listed", "knows_us"), [(None, True), ("vllm_overlay", True), ("lora_resolver", False)])
def test_our_names_are_known_where_our_plugin_is_allowed_and_else_vllm_refuses_them(monkeypatch, listed, knows_us):
    """vLLM finds the entry points that pyproject.toml says, whatever was installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    points = [importlib.metadata.EntryPoint(*item, group) for item in project["entry-points"][group].items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if listed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", listed)
    for function in load_plugins_by_group(group).values():
        function()
    assert set(KVConnectorFactory._registry) == (set(plugin.CONNECTORS) if knows_us else set())
    if not knows_us:
        config = KVTransferConfig(kv_connector="HybridOffloadConnector", kv_role="kv_both")
        with pytest.raises(ValueError, match="Unsupported connector type: HybridOffloadConnector"):
            KVConnectorFactory.get_connector_class(config)


def configured(module: str | None) -> type:
    """The class that a user gets who writes ``kv_connector=MultiConnector``."""
    config = KVTransferConfig(kv_connector="MultiConnector", kv_connector_module_path=module, kv_role="kv_both")
    return KVConnectorFactory.get_connector_class(config)


def test_the_module_path_loads_it_under_vllms_name_and_without_it_the_name_stays_vllms():
    plugin.register()
    vllms = configured(None)
    assert vllms.__module__ == "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
    assert configured("vllm_overlay.multi_connector") is MultiConnector
    assert configured(None) is vllms
