# SPDX-License-Identifier: Apache-2.0
"""For who writes documentation: is what the pages and dashboards name there? See --help."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from devtools.docs.commands import wrong_commands
from devtools.docs.names import unknown_names
from devtools.docs.page import Finding, Page

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = (".", "docs", "examples")
_SAID = re.compile(r"(?:^|\s)#\s(.*)|\"?(?:summary|description)\"?:\s(.*)")
_NAME = re.compile(
    r"vllm-overlay [a-z]+(?: (?:--[a-z][a-z-]*|[A-Z]+\b))*"
    r"|vllm:\w+|--[a-z][a-z-]*|[\w.-]+(?:/[\w.-]*\w)+|[A-Za-z]\w*_\w+"
)
"""A command of ours, a metric, a flag, a path, and a setting or a label."""


def pages_of(root: Path) -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((root / folder).glob("*.md"))]


def files_of(root: Path) -> list[Path]:
    """The files of dashboards/, which are read as pages."""
    return sorted(path for path in (root / "dashboards").glob("*") if path.suffix in (".json", ".yaml", ".yml"))


def _page_of(root: Path, path: Path) -> Page:
    """What the comments and descriptions of each line name, in backticks in that line, and nothing else."""
    return Page(root, path, "\n".join(_names(line) for line in path.read_text(encoding="utf-8").splitlines()))


def _names(line: str) -> str:
    said = _SAID.search(line)
    return " ".join(f"`{name}`" for name in _NAME.findall(said[1] or said[2])) if said else ""


def broken_links(page: Page) -> Iterator[Finding]:
    """Relative links, and the anchors that they name. Links to other hosts are not followed."""
    for link in page.links:
        if "://" in link.text or link.text.startswith("mailto:"):
            continue
        name, _, anchor = unquote(link.text).partition("#")
        target = (page.path.parent / name).resolve() if name else page.path.resolve()
        if not target.exists():
            yield Finding(page.name, link.line, f"link to {link.text}: no such file")
        elif not target.is_relative_to(page.root.resolve()):
            yield Finding(page.name, link.line, f"link to {link.text}: it lies outside of the repository")
        elif anchor and target.suffix == ".md" and anchor not in Page.read(page.root, target).anchors:
            yield Finding(page.name, link.line, f"link to {link.text}: no heading makes the anchor #{anchor}")


CHECKS = (broken_links, wrong_commands, unknown_names)


def check(root: Path, paths: Sequence[Path]) -> Iterator[Finding]:
    """What is wrong with the pages, in their order. Raises OSError for a page that cannot be read."""
    for path in paths:
        page = Page.read(root, path) if path.suffix == ".md" else _page_of(root, path)
        yield from sorted(finding for find in CHECKS for finding in find(page))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Checks links, anchors, commands, settings, metrics and other names of Markdown pages, and of "
        "comments and descriptions in dashboards/. Prints page:line: what is wrong.",
        epilog="exit status: 0: nothing is wrong; 1: something is; 2: wrong usage, or a page cannot be read",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, metavar="DIR", help="the repository (default: this)")
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="below the root (default: all of ., docs, examples, dashboards)"
    )
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    paths = [(root / page).resolve() for page in arguments.pages] or [*pages_of(root), *files_of(root)]
    try:
        findings = list(check(root, paths))
    except (OSError, ValueError) as error:
        print(f"docs_check: {error}", file=sys.stderr)
        return 2
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
