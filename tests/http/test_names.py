# SPDX-License-Identifier: Apache-2.0
"""The README's configuration on a server: metrics of both families and the control file call a child alike."""

import json
import re
from pathlib import Path

import pytest

from tests.engine.client import prompt
from tests.engine.states import FLOAT32
from tests.test_readme import example
from tools.server import Server
from vllm_overlay.metrics import CONNECTOR, HYBRID_OFFLOAD_COUNTERS, HYBRID_OFFLOAD_GAUGES, MULTI_CONNECTOR

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[2] / "docs" / "multi-connector.md"
SMALLER = {"8 GiB": "256 MiB", "200 GiB": "1 GiB"}
COUNTERS = [f"{one.name}_total" for one in HYBRID_OFFLOAD_COUNTERS]
OURS = [*COUNTERS, *(one.name for one in HYBRID_OFFLOAD_GAUGES)]
MULTIS = [f"{one.name}_total" for one in MULTI_CONNECTOR]


def documented_switches() -> str:
    """The example of a control file."""
    (found,) = re.findall(r"^\{\"disk\".*\}$", PAGE.read_text(), re.MULTILINE)
    return str(found)


def test_the_readmes_configuration_has_one_name_for_a_child_everywhere(tiny_model: Path, tmp_path: Path) -> None:
    text = example().replace("/var/cache/vllm-kv", str(tmp_path / "root"))
    for size, smaller in SMALLER.items():
        text = text.replace(size, smaller)
    config = json.loads(text)
    switches = tmp_path / "switches.json"
    switches.write_text(documented_switches())
    config["kv_connector_extra_config"]["control_file"] = str(switches)
    log_path = tmp_path / "server.log"
    with Server(tiny_model, config, log_path=log_path, arguments=FLOAT32.flags) as api:
        api.complete(prompt(1300, seed=1))
        metrics = api.wait_for_stores()
    in_tiers = {label for name in OURS for label in metrics.values(name, CONNECTOR)}
    in_multi = {label for name in MULTIS for label in metrics.values(name, CONNECTOR)}
    assert in_tiers == in_multi == {"cpu", "disk"}
    stored = metrics.values("vllm:hybrid_offload_stored_objects_total", CONNECTOR)
    assert stored.get("cpu", 0) > 0
    assert stored.get("disk", 0) == 0
    log = log_path.read_text()
    assert "the children's switches are now {'cpu': {'min_tokens': 512," in log
    assert "changes nothing" not in log
