# SPDX-License-Identifier: Apache-2.0
"""The README's settings tables are what the code says, and its example is taken as it stands."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec

from vllm_overlay.config import TierSettings
from vllm_overlay.multi_connector.children import child_specs
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings
from vllm_overlay.plugin import register
from vllm_overlay.tiers.cpu import CpuTierSettings
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.factory import tier_spec

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- settings:begin", "<!-- settings:end -->"


def _descriptions(settings: type[msgspec.Struct]) -> dict[str, str]:
    """The description of each field, from the class that says it."""
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        for name, annotation in getattr(cls, "__annotations__", {}).items():
            for part in get_args(annotation)[1:]:
                if isinstance(part, msgspec.Meta) and part.description:
                    found[name] = part.description
    return found


def _default(field: msgspec.structs.FieldInfo) -> str:
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        return "required"
    return f"`{msgspec.json.encode(value).decode()}`"


def _table(title: str, settings: type[msgspec.Struct], common: type[msgspec.Struct] | None = None) -> str:
    """The settings of one class, without those it has from ``common``."""
    shown = {field.name for field in msgspec.structs.fields(common)} if common else set()
    descriptions = _descriptions(settings)
    rows = [
        f"| `{field.name}` | {_default(field)} | {descriptions[field.name]} |"
        for field in msgspec.structs.fields(settings)
        if field.name not in shown
    ]
    return "\n".join([f"**{title}**", "", "| key | default | meaning |", "| --- | --- | --- |", *rows])


def settings_section() -> str:
    """What belongs between the README's markers."""
    return "\n\n".join(
        [
            _table("MultiConnector", MultiSettings),
            _table("any connector, as a child of the MultiConnector", ChildSettings),
            _table("HybridOffloadConnector, every tier", TierSettings),
            _table('HybridOffloadConnector, `"tier": "cpu"`', CpuTierSettings, TierSettings),
            _table('HybridOffloadConnector, `"tier": "disk"`', DiskTierSettings, TierSettings),
        ]
    )


def example() -> str:
    """The README's ``--kv-transfer-config``, as it stands."""
    (found,) = re.findall(r"--kv-transfer-config '(.*?)'", README.read_text(), re.DOTALL)
    return str(found)


def test_the_readme_lists_every_setting_with_its_default_and_meaning() -> None:
    text = README.read_text()
    begin = text.index("\n", text.index(BEGIN)) + 1
    assert text[begin : text.index(END)].strip() == settings_section()


def test_the_readmes_example_works_and_both_families_of_metrics_call_its_children_alike() -> None:
    register()
    specs = child_specs(json.loads(example())["kv_connector_extra_config"], kv_role="kv_both", engine_id=None)
    in_tiers = [tier_spec(spec.kv_transfer_config.kv_connector_extra_config).settings.name for spec in specs]
    assert [spec.name for spec in specs] == in_tiers == ["cpu", "disk"]
