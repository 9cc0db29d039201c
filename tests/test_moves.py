# SPDX-License-Identifier: Apache-2.0
"""What users wrote for 0.1.0 works, or an error names what takes its place; CHANGELOG.md has the whole table."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_plugins_by_group

from vllm_overlay import plugin

REPOSITORY = Path(__file__).parents[1]
GROUP = "vllm.general_plugins"


def rows_below(heading: str) -> list[tuple[str, ...]]:
    """The backquoted first word of each cell, of the changelog's first table below a heading."""
    section = (REPOSITORY / "CHANGELOG.md").read_text().split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [tuple(cell.split("`")[1] for cell in row) for row in rows]


MODULES = rows_below("Modules") + rows_below("Modules of the disk tier")
KEPT = {"vllm_overlay.cli", "vllm_overlay.patch_series"}


def source_of(module: str) -> Path:
    path = REPOSITORY.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_the_changelogs_modules_are_where_it_says() -> None:
    assert len(MODULES) > 30
    assert [new for _, new in MODULES if not source_of(new).exists()] == []
    assert [old for old, _ in MODULES if source_of(old).exists() and old not in KEPT] == []


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("MultiConnector", "vllm_overlay.multi_connector"),
        ("HybridOffloadConnector", "vllm_overlay.connector.connector"),
    ],
)
def test_module_paths_of_a_configuration_go_on_working(name: str, module: str) -> None:
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
    found = KVConnectorFactory.get_connector_class(config)
    assert (found.__name__, found.__module__.startswith(module)) == (name, True)


def test_the_former_module_of_the_patch_series_names_the_new_one_as_a_command_and_as_an_import() -> None:
    for arguments in (["-m", "vllm_overlay.patch_series", "--installed"], ["-c", "import vllm_overlay.patch_series"]):
        done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 1
        assert "run `python -m vllm_overlay.patching`" in done.stderr


@pytest.fixture
def our_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds the entry points that pyproject.toml says, whatever was installed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    points = [importlib.metadata.EntryPoint(*item, GROUP) for item in project["entry-points"][GROUP].items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})


@pytest.mark.usefixtures("our_entry_points")
@pytest.mark.parametrize(
    ("listed", "warns"),
    [
        (None, False),
        ("vllm_overlay", False),
        ("hybrid_offload", True),
        ("lora_resolver,hybrid_offload", True),
        ("hybrid_offload,vllm_overlay", False),
    ],
)
def test_the_former_name_in_vllm_plugins_works_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listed: str | None, warns: bool
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if listed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", listed)
    for function in load_plugins_by_group(GROUP).values():
        function()
    assert set(KVConnectorFactory._registry) == set(plugin.CONNECTORS)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("vllm_overlay")]
    assert [("called vllm_overlay" in text) for text in said] == [True] * warns


@pytest.mark.usefixtures("our_entry_points")
def test_without_our_plugin_our_names_are_refused_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the former name would have led to without its entry point."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    assert load_plugins_by_group(GROUP) == {}
    config = KVTransferConfig(kv_connector="HybridOffloadConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="Unsupported connector type: HybridOffloadConnector"):
        KVConnectorFactory.get_connector_class(config)
