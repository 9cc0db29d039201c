# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package and the imports between its modules, of this tree or of an earlier revision. See --help.

A room is a folder of ``vllm_overlay``; modules beside the folders are the room ``vllm_overlay`` itself. An import runs
when the module is loaded, unless it stands inside a function (later) or under ``if TYPE_CHECKING:`` (never): these two
are counted apart. Circles and chains are of the imports that run at load: only those can fail or delay a start. Python
also runs ``a/__init__.py`` before ``a.b``. That counts as no import, for nobody wrote it.
"""

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_overlay"


class When(StrEnum):
    """When an import runs."""

    AT_LOAD = "at load"
    IN_A_FUNCTION = "in a function"
    TYPE_CHECKING = "under TYPE_CHECKING"


@dataclass(slots=True, frozen=True, order=True)
class Arrow:
    """One module imports another one. ``target`` is a dotted name, of this repository or of anybody."""

    source: str
    target: str
    when: When
    line: int


@dataclass(slots=True, frozen=True)
class Module:
    """One source file: its dotted name (a package's is the folder's), path, text."""

    name: str
    path: str
    text: str

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())


def modules_of_tree(root: Path = REPOSITORY, package: str = PACKAGE) -> list[Module]:
    """The package's modules as they lie under ``root``."""
    paths = sorted(path.relative_to(root).as_posix() for path in (root / package).rglob("*.py"))
    return [Module(name_of(path), path, (root / path).read_text(encoding="utf-8")) for path in paths]


def modules_of_revision(revision: str, root: Path = REPOSITORY, package: str = PACKAGE) -> list[Module]:
    """The package's modules as git has them. Raises CalledProcessError: git does not know ``revision``."""
    listed = _git(root, "ls-tree", "-r", "--name-only", revision, "--", package)
    paths = [path for path in listed.splitlines() if path.endswith(".py")]
    return [Module(name_of(path), path, _git(root, "show", f"{revision}:{path}")) for path in paths]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def name_of(path: str) -> str:
    """``a/b.py`` -> ``a.b``; ``a/__init__.py`` -> ``a``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str, package: str = PACKAGE, depth: int = 1) -> str:
    """The folder below the package, as a dotted name; "" for what is not the package's."""
    parts = module.split(".")
    return "" if parts[0] != package else ".".join(parts[: 1 + depth])


# Imports.


def arrows_of(modules: Sequence[Module]) -> list[Arrow]:
    """Every import. ``from a import b`` imports ``a.b`` where that is one of ``modules``, else ``a``."""
    known = {module.name for module in modules}
    return sorted({arrow for module in modules for arrow in _arrows(module, known)})


def _arrows(module: Module, known: Iterable[str]) -> Iterator[Arrow]:
    for node, when in _imports(ast.parse(module.text, module.path), When.AT_LOAD):
        for target in _targets(node, module, known):
            if target != module.name:
                yield Arrow(module.name, target, when, node.lineno)


def _imports(node: ast.AST, when: When) -> Iterator[tuple[ast.Import | ast.ImportFrom, When]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, when
        return
    for child in ast.iter_child_nodes(node):
        inside = when
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = When.IN_A_FUNCTION
        elif isinstance(node, ast.If) and _is_type_checking(node.test) and child in node.body:
            inside = When.TYPE_CHECKING
        yield from _imports(child, inside if when is When.AT_LOAD else when)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _targets(node: ast.Import | ast.ImportFrom, module: Module, known: Iterable[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        levels_up = node.level - module.is_package
        parts = module.name.split(".")
        base = ".".join([*parts[: len(parts) - levels_up], *([base] if base else [])])
    full = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in known else base for name in full]


def graph_of(arrows: Iterable[Arrow], modules: Sequence[Module]) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports at load."""
    graph: dict[str, set[str]] = {module.name: set() for module in modules}
    for arrow in arrows:
        if arrow.when is When.AT_LOAD and arrow.target in graph:
            graph[arrow.source].add(arrow.target)
    return graph


def circles_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that all import each other, directly or through others (Tarjan's algorithm)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in numbers:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], numbers[target])
        if lowest[name] == numbers[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in numbers:
            visit(name)
    return sorted(found)


def longest_chain(graph: Mapping[str, set[str]], prefix: str) -> list[str]:
    """The longest way from import to import inside ``prefix``, its first module first.

    Raises:
        ValueError: there is a circle, and so no longest way.
    """
    inside = {name: {t for t in graph[name] if _is_below(t, prefix)} for name in graph if _is_below(name, prefix)}
    if circles := circles_of(inside):
        raise ValueError(f"no longest chain: {', '.join(circles[0])} import each other")
    longest: dict[str, list[str]] = {}

    def chain_from(name: str) -> list[str]:
        if name not in longest:
            rests = [chain_from(target) for target in sorted(inside[name])]
            longest[name] = [name, *max(rests, key=len, default=[])]
        return longest[name]

    return max((chain_from(name) for name in sorted(inside)), key=len, default=[])


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


# What is printed.


def report(modules: Sequence[Module], chain: str | None = None) -> str:
    """The table of rooms, the arrows between them, the circles, and the longest chain inside ``chain``."""
    arrows = arrows_of(modules)
    graph = graph_of(arrows, modules)
    parts = [_table(modules), _between_rooms(graph), _counts(arrows, graph), _circles(graph)]
    if chain is not None:
        links = longest_chain(graph, chain)
        parts.append(f"longest chain of imports inside {chain}: {len(links)} modules\n  " + "\n  -> ".join(links))
    return "\n\n".join(parts)


def _folder(module: Module) -> str:
    return str(Path(module.path).parent)


def _table(modules: Sequence[Module]) -> str:
    rooms: defaultdict[str, list[Module]] = defaultdict(list)
    for module in modules:
        rooms[_folder(module)].append(module)
    rows = [("room", "files", "lines", "largest file")]
    for folder in sorted(rooms):
        largest = max(rooms[folder], key=lambda module: module.num_lines)
        lines = sum(module.num_lines for module in rooms[folder])
        rows.append((folder, str(len(rooms[folder])), str(lines), f"{Path(largest.path).name} {largest.num_lines}"))
    rows.append(("all", str(len(modules)), str(sum(module.num_lines for module in modules)), ""))
    return "\n".join(f"{room:36}{files:>6}{lines:>8}  {largest}".rstrip() for room, files, lines, largest in rows)


def _between_rooms(graph: Mapping[str, set[str]]) -> str:
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for source, targets in graph.items():
        rooms[room_of(source)] |= {room_of(target) for target in targets} - {room_of(source)}
    lines = [f"  {room} -> {', '.join(sorted(rooms[room]))}" for room in sorted(rooms) if rooms[room]]
    return "\n".join(["imports between rooms:", *lines])


def _counts(arrows: Sequence[Arrow], graph: Mapping[str, set[str]]) -> str:
    own = [arrow for arrow in arrows if arrow.target in graph]
    return "imports inside the package: " + ", ".join(
        f"{sum(arrow.when is when for arrow in own)} {when}" for when in When
    )


def _circles(graph: Mapping[str, set[str]]) -> str:
    circles = circles_of(graph)
    lines = [f"  {', '.join(circle)}" for circle in circles]
    return "\n".join([f"import circles: {len(circles) or 'none'}", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0, 1 where there is an import circle, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m devtools.rooms",
        description="Files and lines of each room, the imports between rooms, import circles, the longest chain.",
        epilog="examples:\n"
        "  python -m devtools.rooms --chain vllm_overlay.tiers\n"
        "  python -m devtools.rooms --git e67e0be --chain vllm_overlay.tiers\n\n"
        "exit status: 0 no import circle, 1 there is one, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--git", metavar="REV", help="read that revision instead of the files here")
    parser.add_argument("--chain", metavar="ROOM", help="also print the longest chain of imports inside this room")
    arguments = parser.parse_args(argv)
    try:
        modules = modules_of_tree() if arguments.git is None else modules_of_revision(arguments.git)
        print(report(modules, arguments.chain))
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"devtools.rooms: {error}", file=sys.stderr)
        return 2
    return int(bool(circles_of(graph_of(arrows_of(modules), modules))))


if __name__ == "__main__":
    sys.exit(main())
