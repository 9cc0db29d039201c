# SPDX-License-Identifier: Apache-2.0
"""The imports between the package's modules, for ``test_imports.py``.

An import runs at load unless it stands in a function or under ``if TYPE_CHECKING:``. Python also runs ``a/__init__.py``
before ``a.b``. That counts as no import, for nobody wrote it.
"""

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
_TYPING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(slots=True, frozen=True)
class Module:
    """One source file. ``name`` is dotted; ``package`` is what its relative imports begin at."""

    name: str
    package: str
    text: str


@dataclass(slots=True, frozen=True)
class Arrow:
    """One module imports another one, of this repository or of anybody."""

    source: str
    target: str
    at_load: bool


def modules_of(package: str, root: Path = REPOSITORY) -> Iterator[Module]:
    for path in sorted((root / package).rglob("*.py")):
        folder = ".".join(path.parent.relative_to(root).parts)
        name = folder if path.stem == "__init__" else f"{folder}.{path.stem}"
        yield Module(name, folder, path.read_text(encoding="utf-8"))


def arrows_of(modules: Sequence[Module]) -> set[Arrow]:
    """Every import. ``from a import b`` imports ``a.b`` where that is one of ``modules``, else ``a``."""
    known = {module.name for module in modules}
    return {
        Arrow(module.name, target, at_load)
        for module in modules
        for node, at_load in _imports(ast.parse(module.text), True)
        for target in _targets(node, module.package, known)
        if target != module.name
    }


def _imports(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, at_load
    never = node.body if isinstance(node, ast.If) and ast.unparse(node.test) in _TYPING else []
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, at_load and child not in never and not isinstance(node, _LATER))


def _targets(node: ast.Import | ast.ImportFrom, package: str, known: Collection[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = resolve_name("." * node.level + (node.module or ""), package)
    full = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in known else base for name in full]


def circle_of(modules: Sequence[Module]) -> list[str]:
    """Modules of which each imports the next one at load, and the last one the first; empty if there are none."""
    graph: dict[str, set[str]] = {module.name: set() for module in modules}
    for arrow in arrows_of(modules):
        if arrow.at_load and arrow.target in graph:
            graph[arrow.source].add(arrow.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1][:0:-1])
    return []
