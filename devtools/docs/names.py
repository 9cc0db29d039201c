# SPDX-License-Identifier: Apache-2.0
"""Identifiers and flags in backticks: each stands somewhere in this repository's files or in vLLM's source.

Where no vLLM is installed only its flags and identifiers go unchecked. Nothing is imported.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from devtools.docs.findings import Finding
from devtools.docs.page import Page, Text
from devtools.docs.paths import FOLDERS, HISTORY, PROPOSED

ELSEWHERE = {
    "--separate-object-groups": "LMCache",
    "--supported-transfer-mode": "LMCache",
    "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": "CUDA's driver",
    "_MambaUnifiedViewEdit": "LMCache",
    "_lib_fn_wrapper": "a message of LMCache's",
    "deferred_loads": "vLLM 0.33.0",
    "derive_key": "BLAKE3",
    "engine_driven": "LMCache",
    "kv_cache_group_edits": "LMCache",
    "l2_adapters": "LMCache",
    "lmcache_driven": "LMCache",
    "max_capacity_gb": "LMCache",
    "migrate_to_shm_and_wrap": "LMCache",
    "test_multi_example_connector_consistency": "vLLM's own tests",
    "test_scheduler_kv_connector_override": "vLLM's own tests",
}
"""Names of other projects -> whose."""
_WORD = re.compile(r"\w+")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_IDENTIFIER = re.compile(
    r"[A-Za-z_]*[a-z0-9]_[a-z0-9]\w*|[A-Z0-9]+(?:_[A-Z0-9]+)+|[A-Za-z_]\w*[a-z][A-Z]\w*|[a-z][A-Z]\w*"
)
_NOT_ASKED = (Path(__file__).name, "test_docs.py")
"""Files with names that nothing else has: this list, and the test that such names are found."""
_SOURCES = (".json", ".patch", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", "")


def unknown_names(page: Page) -> Iterator[Finding]:
    """Words with an underscore or a capital inside, and long options."""
    if page.name in HISTORY:
        return
    for span in page.code_spans:
        if span.text.startswith(PROPOSED):
            continue
        for name in _names(span):
            if not is_known(page.root, name):
                yield Finding(page.name, span.line, f"`{span.text}`: nothing here or in vLLM is called {name}")


def _names(span: Text) -> list[str]:
    flags = _FLAG.findall(span.text)
    words = _WORD.findall(_FLAG.sub(" ", span.text))
    return [*flags, *(word for word in words if _IDENTIFIER.fullmatch(word))]


def is_known(root: Path, name: str) -> bool:
    """Whether a name, or a flag, stands in some file; ``_tokens`` may stand for all names that end so."""
    if name in ELSEWHERE or "NNNN" in name:
        return True
    if name.startswith("--"):
        field = name[2:].removeprefix("no-").replace("-", "_")
        return name in _own_flags(root) or _vllm_words() is None or field in (_vllm_words() or ())
    if name in _own_words(root):
        return True
    if name.startswith("_") and any(word.endswith(name) for word in _own_words(root)):
        return True
    return _vllm_words() is None or name in (_vllm_words() or ())


@cache
def _own_words(root: Path) -> frozenset[str]:
    """All words of this repository's sources, and its files' names."""
    return _words_of(_own_files(root))


@cache
def _own_flags(root: Path) -> frozenset[str]:
    return frozenset(flag for text in _texts(_own_files(root)) for flag in _FLAG.findall(text))


@cache
def _own_files(root: Path) -> tuple[Path, ...]:
    folders = [root / folder for folder in (*FOLDERS, ".github") if folder != "docs"]
    below = [file for folder in folders for file in folder.rglob("*")]
    found = [*below, *root.glob("*")]
    return tuple(file for file in found if file.is_file() and file.suffix in _SOURCES)


@cache
def _vllm_words() -> frozenset[str] | None:
    """All words of the installed vLLM's source and its files' names; None without a vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return _words_of(list(Path(spec.origin).parent.rglob("*.py")))


def _words_of(files: Sequence[Path]) -> frozenset[str]:
    """The words of files, and the files' names."""
    words = {word for text in _texts(files) for word in _WORD.findall(text)}
    return frozenset(words | {file.stem for file in files})


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        if file.name not in _NOT_ASKED:
            yield file.read_text(encoding="utf-8", errors="replace")
