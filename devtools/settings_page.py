# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/configuration.md, from the classes that check the settings.

python -m devtools.settings_page    # writes them; tests/test_docs.py says if they are stale
"""

from pathlib import Path
from typing import get_args

import msgspec

from devtools.docs.generated import with_parts
from vllm_overlay.config import TierSettings
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings
from vllm_overlay.tiers.cpu import CpuTierSettings
from vllm_overlay.tiers.disk.settings import DiskTierSettings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def tables() -> str:
    found = [
        _table("What does the MultiConnector take?", MultiSettings),
        _table("What does any child of the MultiConnector take?", ChildSettings),
        _table("What does every tier take?", TierSettings),
        _table("What does the CPU tier take?", CpuTierSettings, TierSettings),
        _table("What does the disk tier take?", DiskTierSettings, TierSettings),
    ]
    return "\n" + "\n\n".join(found) + "\n\n"


def _table(heading: str, settings: type[msgspec.Struct], common: type[msgspec.Struct] | None = None) -> str:
    """The settings of one class, without those it has from ``common``."""
    shared = {field.name for field in msgspec.structs.fields(common)} if common else set()
    descriptions = _descriptions(settings)
    rows = [
        f"| `{field.name}` | {_default(field)} | {descriptions[field.name]} |"
        for field in msgspec.structs.fields(settings)
        if field.name not in shared
    ]
    return "\n".join([f"### {heading}", "", "| setting | default | meaning |", "| --- | --- | --- |", *rows])


def _descriptions(settings: type[msgspec.Struct]) -> dict[str, str]:
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        for name, annotation in getattr(cls, "__annotations__", {}).items():
            for part in get_args(annotation)[1:]:
                if isinstance(part, msgspec.Meta) and part.description:
                    found[name] = part.description
    return found


def _default(field: msgspec.structs.FieldInfo) -> str:
    is_required = field.default is msgspec.NODEFAULT
    return "required" if is_required else f"`{msgspec.json.encode(field.default).decode()}`"


if __name__ == "__main__":
    PAGE.write_text(with_parts(PAGE.read_text(), {"settings": tables()}))
