# SPDX-License-Identifier: Apache-2.0
"""The files of dashboards/, read as pages: what their comments and descriptions name stands in backticks."""

import re
from pathlib import Path

from devtools.docs.page import Page

_SAID = re.compile(r"(?:^|\s)#\s(.*)|\"?(?:summary|description)\"?:\s(.*)")
_NAME = re.compile(
    r"vllm-overlay [a-z]+(?: (?:--[a-z][a-z-]*|[A-Z]+\b))*"
    r"|vllm:\w+|--[a-z][a-z-]*|[\w.-]+(?:/[\w.-]*\w)+|[A-Za-z]\w*_\w+"
)
"""A command of ours, a metric, a flag, a path, and a setting or a label."""


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in (root / "dashboards").glob("*") if path.suffix in (".json", ".yaml", ".yml"))


def page_of(root: Path, path: Path) -> Page:
    """With the names of each line in that line, and nothing else. Raises OSError for a file that cannot be read."""
    return Page(root, path, "\n".join(_names(line) for line in path.read_text(encoding="utf-8").splitlines()))


def _names(line: str) -> str:
    said = _SAID.search(line)
    return " ".join(f"`{name}`" for name in _NAME.findall(said[1] or said[2])) if said else ""
