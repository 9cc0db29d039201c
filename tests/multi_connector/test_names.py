# SPDX-License-Identifier: Apache-2.0
"""What a child is called when nobody says it: everywhere the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, multi, prompt
from tests.engine.states import FLOAT32
from tests.multi_connector.fakes import child
from tests.multi_connector.test_third_party import offloading_child
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.children import ChildSpec, child_specs

STORE = "tests.tiers.store_tier:StoreTierSpec"
MODULE = {"kv_connector_module_path": "vllm_overlay.connector.connector"}


def tier(**settings: Any) -> dict[str, Any]:
    """A child of ours, found without the plug-in."""
    return {"kv_connector": "HybridOffloadConnector", **MODULE, "kv_connector_extra_config": settings}


def specs(*children: dict[str, Any]) -> list[ChildSpec]:
    return child_specs({"connectors": list(children)}, kv_role="kv_both", engine_id="engine")


def test_a_child_is_called_by_its_name_else_its_tier_else_its_class(tmp_path: Path) -> None:
    found = specs(
        tier(tier="cpu"),
        tier(tier="disk", root=str(tmp_path / "one")),
        tier(tier="disk", root=str(tmp_path / "two")),
        tier(tier=STORE, shelf="top"),
        tier(tier="cpu", name="small"),
        child(),
        child(tier="cpu"),
    )
    names = ["cpu", "disk", "disk#2", STORE, "small", "FakeChild", "FakeChild#2"]
    assert [spec.name for spec in found] == names
    shown = [spec.kv_transfer_config.kv_connector_extra_config.get("name") for spec in found]
    assert shown == [*names[:5], None, None]


def test_a_default_name_gives_way_to_a_given_one() -> None:
    assert [spec.name for spec in specs(tier(tier="cpu"), tier(tier="cpu", name="cpu"))] == ["cpu#2", "cpu"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "connector 'HybridOffloadConnector': tier is not set: set kv_connector_extra_config.tier to \"cpu\" or"),
        ({"tier": "dsk"}, "connector 'dsk': tier='dsk' is not known: set it to \"cpu\" or \"disk\", or to"),
        ({"tier": "disk"}, "connector 'disk': root of the disk tier is not set: set it to a string that is not empty"),
        ({"tier": "cpu", "name": "a", "capacity": 1}, "connector 'a': unknown setting 'capacity' of the cpu tier"),
    ],
)
def test_a_setting_of_a_tier_is_refused_before_anything_is_built(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        specs(tier(**settings))
    assert str(caught.value).startswith(sentence)


def test_two_children_on_one_root_are_refused_whatever_it_is_called(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ConfigError) as caught:
        specs(tier(tier="disk", root=str(root)), tier(tier="disk", root=str(tmp_path / "link" / "..." / "..")))
    assert str(caught.value) == (
        f"connectors 'disk' and 'disk#2' of the MultiConnector have one root, '{root}': give each its own, such as "
        f'"{root}-2"'
    )


@pytest.mark.engine
def test_both_families_of_metrics_and_the_control_file_agree(tiny_model: Path, tmp_path: Path) -> None:
    ours = {
        "cpu": tier(tier="cpu", capacity_bytes="256 MiB"),
        "disk": tier(tier="disk", root=str(tmp_path / "one"), capacity_bytes="1 GiB"),
        "disk#2": tier(tier="disk", root=str(tmp_path / "two"), capacity_bytes="1 GiB"),
        STORE: tier(tier=STORE, shelf="top"),
        "small": tier(tier="cpu", capacity_bytes="64 MiB", name="small"),
    }
    third = offloading_child(tmp_path / "fs")
    del third["kv_connector_extra_config"]["name"]
    switches = tmp_path / "switches.json"
    switches.write_text('{"disk#2": {"store": false}, "OffloadingConnector": {"load": false}}')
    config = multi(*ours.values(), third, control_file=str(switches))
    config["kv_connector"] = "WeightedMultiConnector"
    del config["kv_connector_module_path"]
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        engine.generate(prompt(1300, seed=1))
        engine.wait_for_stores()
        for name in ours:
            assert engine.metric("vllm:hybrid_offload_lookups", connector=name) == 1
        assert engine.metric("vllm:hybrid_offload_lookups") == len(ours)
        for name in (*ours, "OffloadingConnector"):
            assert engine.metric("vllm:kv_connector_queries", connector=name) == 1
        assert engine.metric("vllm:kv_connector_queries") == len(ours) + 1
        assert engine.metric("vllm:hybrid_offload_stored_objects", connector="disk") > 0
        assert engine.metric("vllm:hybrid_offload_stored_objects", connector="disk#2") == 0
        assert "the children's switches are now" in engine.log
