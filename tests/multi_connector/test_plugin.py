# SPDX-License-Identifier: Apache-2.0
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_overlay import plugin
from vllm_overlay.multi_connector import MultiConnector


def test_registering_twice_is_registering_once():
    plugin.register()
    first = dict(KVConnectorFactory._registry)
    plugin.register()
    assert KVConnectorFactory._registry == first
    assert set(plugin.CONNECTORS) <= set(first)


def test_our_multi_connector_is_known_by_a_name_of_its_own():
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("WeightedMultiConnector") is MultiConnector


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
