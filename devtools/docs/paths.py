# SPDX-License-Identifier: Apache-2.0
"""Paths of this repository and dotted names of its modules, in backticks."""

import re
from collections.abc import Iterator
from pathlib import Path

from devtools.docs.findings import Finding
from devtools.docs.page import Page

FOLDERS = ("bench", "dashboards", "devtools", "docker", "docs", "examples", "patches", "tests", "tools", "vllm_overlay")
PACKAGES = ("bench", "devtools", "tests", "tools", "vllm_overlay")
PROPOSED = ("tiers/composed/",)
"""What docs/composition.md proposes, and nobody has written."""
HISTORY = ("CHANGELOG.md",)
"""Pages that name what was there."""
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)+/?(?:::\w+)*|[\w-]+/")
_DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")


def missing_paths(page: Page) -> Iterator[Finding]:
    """A path may be relative to the repository, to the package ``vllm_overlay``, or to ``tests``."""
    if page.name in HISTORY:
        return
    for span in page.code_spans:
        if _PATH.fullmatch(span.text):
            what = problem_of_path(page.root, span.text)
        elif _DOTTED.fullmatch(span.text):
            what = problem_of_module(page.root, span.text)
        else:
            continue
        if what:
            yield Finding(page.name, span.line, f"`{span.text}`: {what}")


def problem_of_path(root: Path, path: str) -> str | None:
    """What is wrong with a path of this repository; None also for any other path."""
    file, *tests = path.split("::")
    first = file.split("/")[0]
    bases = (root, root / "vllm_overlay", root / "tests")
    if "NNNN" in file or file.startswith(PROPOSED) or _is_of_vllm(file):
        return None
    if first not in FOLDERS and not any((base / first).is_dir() for base in bases):
        return None
    found = [each for base in bases for each in base.glob(file.rstrip("/"))]
    if not found:
        return "no such file"
    text = "" if found[0].is_dir() else found[0].read_text(encoding="utf-8", errors="replace")
    missing = [test for test in tests if not re.search(rf"(?:def|class) {test}\b", text)]
    return f"{file} has no {missing[0]}" if missing else None


def _is_of_vllm(file: str) -> bool:
    """vLLM has its own ``tests``; ours have no ``v1``."""
    return file.startswith("tests/v1")


def problem_of_module(root: Path, dotted: str) -> str | None:
    """What is wrong with a dotted name below one of our packages; None also for any other name."""
    first, *rest = dotted.split(".")
    if first not in PACKAGES or rest[-1] in ("py", "md", "json", "txt"):
        return None
    where = root / first
    while rest and ((where / rest[0]).is_dir() or (where / f"{rest[0]}.py").is_file()):
        where = where / rest.pop(0)
    source = where.with_suffix(".py") if where.with_suffix(".py").is_file() else where / "__init__.py"
    if rest and not re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8") if source.is_file() else ""):
        return f"there is no {rest[0]} in {where.relative_to(root).as_posix()}"
    return None
