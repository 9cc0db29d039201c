# SPDX-License-Identifier: Apache-2.0
"""What stands in backticks is there: paths, modules, metrics; settings, flags and other names, here or in vLLM.

Nothing is imported. Without a vLLM every other name is taken for one of its.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from devtools.docs.page import Finding, Page

PACKAGES = ("bench", "devtools", "tests", "tools", "vllm_overlay")
FOLDERS = (*PACKAGES, "dashboards", "docker", "docs", "examples", "patches")
ELSEWHERE = ("--separate-object-groups", "_lib_fn_wrapper", "derive_key", "engine_driven", "max_capacity_gb")
"""Names of LMCache, numba and BLAKE3."""
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)+/?(?:::\w+)*|[\w-]+/")
_DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")
_METRIC = re.compile(r"vllm:(?:hybrid_offload|kv_connector)_\w*\*?")
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_created")
_WORD = re.compile(r"\w+")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_IDENTIFIER = re.compile(
    r"[A-Za-z_]*[a-z0-9]_[a-z0-9]\w*|[A-Z0-9]+(?:_[A-Z0-9]+)+|[A-Za-z_]\w*[a-z][A-Z]\w*|[a-z][A-Z]\w*"
)
_NOT_ASKED = (Path(__file__).name, "test_docs.py")
"""Files with names that nothing else has: this list, and the test that such names are found."""
_SOURCES = (".json", ".patch", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", "")


def unknown_names(page: Page) -> Iterator[Finding]:
    for number, line in enumerate(page.lines, 1):
        for name in _METRIC.findall(line):
            if not _is_metric(page.root, name):
                yield Finding(page.name, number, f"{name}: vllm_overlay/metrics.py has no such metric")
    for span in page.code_spans:
        if what := _problem_of_path(page.root, span.text) or _problem_of_module(page.root, span.text):
            yield Finding(page.name, span.line, f"`{span.text}`: {what}")
        for name in _names(_METRIC.sub(" ", span.text)):
            if not is_known(page.root, name):
                yield Finding(page.name, span.line, f"`{span.text}`: nothing here or in vLLM is called {name}")


def _is_metric(root: Path, name: str) -> bool:
    """``vllm:..._*`` stands for all names that begin so."""
    known = re.findall(r'"(vllm:\w+)"', (root / "vllm_overlay" / "metrics.py").read_text(encoding="utf-8"))
    if name.endswith(("*", "_")):
        return any(each.startswith(name.rstrip("*")) for each in known)
    return any(name.removesuffix(suffix) in known for suffix in _SUFFIXES)


def _problem_of_path(root: Path, path: str) -> str | None:
    """A path may be relative to the repository, to the package ``vllm_overlay``, or to ``tests``."""
    if not _PATH.fullmatch(path) or "NNNN" in path or path.startswith("tests/v1"):  # vLLM's own tests
        return None
    file, *tests = path.split("::")
    bases = (root, root / "vllm_overlay", root / "tests")
    first = file.split("/")[0]
    if first not in FOLDERS and not any((base / first).is_dir() for base in bases):
        return None
    found = [each for base in bases for each in base.glob(file.rstrip("/"))]
    if not found:
        return "no such file"
    text = "" if found[0].is_dir() else found[0].read_text(encoding="utf-8", errors="replace")
    missing = [test for test in tests if not re.search(rf"(?:def|class) {test}\b", text)]
    return f"{file} has no {missing[0]}" if missing else None


def _problem_of_module(root: Path, dotted: str) -> str | None:
    first, *rest = dotted.split(".")
    if not _DOTTED.fullmatch(dotted) or first not in PACKAGES or rest[-1] in ("py", "md", "json", "txt"):
        return None
    where = root / first
    while rest and ((where / rest[0]).is_dir() or (where / f"{rest[0]}.py").is_file()):
        where = where / rest.pop(0)
    source = where.with_suffix(".py") if where.with_suffix(".py").is_file() else where / "__init__.py"
    if rest and not re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8") if source.is_file() else ""):
        return f"there is no {rest[0]} in {where.relative_to(root).as_posix()}"
    return None


def _names(text: str) -> list[str]:
    words = _WORD.findall(_FLAG.sub(" ", text))
    return [*_FLAG.findall(text), *(word for word in words if _IDENTIFIER.fullmatch(word))]


def is_known(root: Path, name: str) -> bool:
    """Whether a name, or a flag, stands in some file; ``_tokens`` may stand for all names that end so."""
    if name in ELSEWHERE or "NNNN" in name:
        return True
    theirs = _vllm_words()
    if name.startswith("--"):
        field = name[2:].removeprefix("no-").replace("-", "_")
        return theirs is None or field in theirs or name in _own_flags(root)
    if name in _own_words(root) or (name.startswith("_") and any(word.endswith(name) for word in _own_words(root))):
        return True
    return theirs is None or name in theirs


@cache
def _own_words(root: Path) -> frozenset[str]:
    """All words of this repository's sources, its files' names, and its alerts'."""
    alerts = re.findall(r"alert: (\w+)", "".join(_texts((root / "dashboards").glob("*.yml"))))
    return _words_of(_own_files(root)) | set(alerts)


@cache
def _own_flags(root: Path) -> frozenset[str]:
    return frozenset(flag for text in _texts(_own_files(root)) for flag in _FLAG.findall(text))


@cache
def _own_files(root: Path) -> tuple[Path, ...]:
    folders = [root / folder for folder in (*FOLDERS, ".github") if folder not in ("dashboards", "docs")]
    found = [*root.glob("*"), *(file for folder in folders for file in folder.rglob("*"))]
    return tuple(file for file in found if file.is_file() and file.suffix in _SOURCES)


@cache
def _vllm_words() -> frozenset[str] | None:
    """All words of the installed vLLM's source, and its files' names."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else _words_of(tuple(Path(spec.origin).parent.rglob("*.py")))


def _words_of(files: tuple[Path, ...]) -> frozenset[str]:
    return frozenset({word for text in _texts(files) for word in _WORD.findall(text)} | {file.stem for file in files})


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        if file.name not in _NOT_ASKED:
            yield file.read_text(encoding="utf-8", errors="replace")
