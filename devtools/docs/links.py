# SPDX-License-Identifier: Apache-2.0
"""Relative links, and the anchors that they name."""

from collections.abc import Iterator
from urllib.parse import unquote

from devtools.docs.page import Finding, Page


def broken_links(page: Page) -> Iterator[Finding]:
    """Links to other hosts are not followed."""
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
