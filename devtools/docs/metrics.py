# SPDX-License-Identifier: Apache-2.0
"""Names of our two families of metrics."""

import re
from collections.abc import Iterator
from pathlib import Path

from devtools.docs.findings import Finding
from devtools.docs.page import Page

_NAME = re.compile(r"vllm:(?:hybrid_offload|kv_connector)_\w*\*?")
_SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")


def unknown_metrics(page: Page) -> Iterator[Finding]:
    """``vllm:..._*`` stands for all names that begin so."""
    known = _known(page.root)
    for number, line in enumerate(page.lines, 1):
        for name in _NAME.findall(line):
            if not _is_known(name, known):
                yield Finding(page.name, number, f"{name}: vllm_overlay/metrics.py has no such metric")


def _known(root: Path) -> set[str]:
    return set(re.findall(r'"(vllm:\w+)"', (root / "vllm_overlay" / "metrics.py").read_text(encoding="utf-8")))


def _is_known(name: str, known: set[str]) -> bool:
    if name.endswith(("*", "_")):
        return any(each.startswith(name.rstrip("*")) for each in known)
    return name in known or any(name.removesuffix(suffix) in known for suffix in _SUFFIXES)
