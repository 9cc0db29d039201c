# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md and the files for a deployment name what is there."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.dashboards.boards import DIRECTORY, NAMES
from tests.dashboards.test_alerts import rules
from tests.transfer_config import accepted_tiers

PAGE = DIRECTORY.parent / "docs" / "operations.md"


def parsed(name: str) -> Any:
    return yaml.safe_load((DIRECTORY / name).read_text())


def test_the_page_has_every_alert_with_its_severity() -> None:
    rows = re.findall(r"^\| `(VllmOverlay\w+)` \| (\w+) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in rules() if "alert" in rule]


def test_the_page_shows_both_dashboards() -> None:
    images = re.findall(r"!\[\w+\]\((images/\w+\.png)\)", PAGE.read_text())
    assert images == [f"images/{name}.png" for name in NAMES]
    assert all((PAGE.parent / image).exists() for image in images)


def test_compose_mounts_what_is_there_where_it_is_looked_for() -> None:
    services = parsed("compose.yaml")["services"]
    mounts = {}
    for service in ("prometheus", "grafana"):
        for volume in services[service]["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                assert (DIRECTORY / source).exists(), source
                mounts[target] = source
    (provider,) = parsed("provisioning/dashboards/vllm-overlay.yml")["providers"]
    folder = provider["options"]["path"]
    assert {target for target in mounts if target.startswith(folder)} == {f"{folder}/{name}.json" for name in NAMES}
    (alerts,) = parsed("prometheus.yml")["rule_files"]
    assert f"/etc/prometheus/{alerts}" in mounts
    (source,) = parsed("provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"].split("//")[1].split(":")[0] in services
    (scraped,) = parsed("prometheus.yml")["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == ["vllm:8000"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])


def test_composes_server_gets_a_configuration_that_is_accepted() -> None:
    command = parsed("compose.yaml")["services"]["vllm"]["command"]
    (text,) = (argument for argument in command if argument.startswith("--kv-transfer-config="))
    config = json.loads(text.removeprefix("--kv-transfer-config="))
    assert accepted_tiers(config) == ["cpu", "disk"]
    _, disk = config["kv_connector_extra_config"]["connectors"]
    mounted = {volume.split(":")[1] for volume in parsed("compose.yaml")["services"]["vllm"]["volumes"]}
    assert Path(disk["kv_connector_extra_config"]["root"]) in {Path(target) for target in mounted}
