# SPDX-License-Identifier: Apache-2.0
"""For who writes documentation: is what the pages and dashboards name there? See --help."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from devtools.docs.commands import wrong_commands
from devtools.docs.deployment import files_of, page_of
from devtools.docs.links import broken_links
from devtools.docs.names import unknown_names
from devtools.docs.page import Finding, Page
from devtools.metrics_page import stale_lists

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKS = (broken_links, wrong_commands, unknown_names, stale_lists)
FOLDERS = (".", "docs", "examples")


def pages_of(root: Path) -> list[Path]:
    """All pages of the repository ``root``."""
    return [path for folder in FOLDERS for path in sorted((root / folder).glob("*.md"))]


def check(root: Path, paths: Sequence[Path]) -> Iterator[Finding]:
    """What is wrong with the pages, in their order. Raises OSError for a page that cannot be read."""
    for path in paths:
        page = Page.read(root, path) if path.suffix == ".md" else page_of(root, path)
        yield from sorted(finding for find in CHECKS for finding in find(page))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when nothing is wrong, else 1."""
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
