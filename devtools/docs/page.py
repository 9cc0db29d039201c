# SPDX-License-Identifier: Apache-2.0
"""One Markdown page as GitHub reads it: its headings, links and code, each with its line."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
_HTML_LINK = re.compile(r"<(?:a|img)\s[^>]*(?:href|src)=\"([^\"]+)\"")
_COMMENT = "<!--"


@dataclass(slots=True, frozen=True, order=True)
class Finding:
    """What is wrong with a page. ``page`` is relative to the repository; ``line`` begins at 1."""

    page: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.what}"


@dataclass(slots=True, frozen=True)
class Text:
    """A piece of a page and the line, from 1, where it begins."""

    line: int
    text: str


@dataclass(slots=True, frozen=True)
class CodeBlock(Text):
    """A fenced block, from its first line of code on. ``language`` is empty if none is named."""

    language: str


@dataclass(frozen=True)
class Page:
    """``path`` lies below ``root``, the repository. Raises OSError or UnicodeDecodeError when it is first read."""

    root: Path
    path: Path
    text: str = field(default="", repr=False)

    @classmethod
    def read(cls, root: Path, path: Path) -> "Page":
        return cls(root, path, path.read_text(encoding="utf-8"))

    @property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def code_blocks(self) -> list[CodeBlock]:
        fences = [(_line_of(token) + 1, token) for token in self._tokens if token.type == "fence"]
        return [CodeBlock(line, token.content.removesuffix("\n"), token.info.strip()) for line, token in fences]

    @cached_property
    def anchors(self) -> set[str]:
        """What ``#...`` can name: GitHub's anchor of each heading, and explicit ones."""
        anchors = {found for html in self._html for found in _ANCHOR.findall(html.text)}
        seen: Counter[str] = Counter()
        for before, token in zip(self._tokens, self._tokens[1:], strict=False):
            if before.type == "heading_open":
                shown = "".join(child.content for child in token.children or ())
                slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
                anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
                seen[slug] += 1
        return anchors

    @cached_property
    def links(self) -> list[Text]:
        targets = {"link_open": "href", "image": "src"}
        found = [Text(line, str(at.attrs[targets[at.type]])) for line, at in self._inline if at.type in targets]
        return found + [Text(html.line, target) for html in self._html for target in _HTML_LINK.findall(html.text)]

    @cached_property
    def code_spans(self) -> list[Text]:
        return [Text(line, at.content) for line, at in self._inline if at.type == "code_inline"]

    @cached_property
    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    @cached_property
    def _inline(self) -> list[tuple[int, Token]]:
        return [found for token in self._tokens if token.type == "inline" for found in _children(token)]

    @property
    def _html(self) -> Iterator[Text]:
        """Tags and blocks of HTML that are no comments."""
        pieces = [*self._inline, *((_line_of(token), token) for token in self._tokens if token.type == "html_block")]
        for line, token in pieces:
            if token.type.startswith("html_") and not token.content.lstrip().startswith(_COMMENT):
                yield Text(line, token.content)


def _line_of(token: Token) -> int:
    """Of a block that the page has, from 1."""
    assert token.map is not None
    return token.map[0] + 1


def _children(token: Token) -> Iterator[tuple[int, Token]]:
    """Those of an inline token with their lines. A code span is asked for its own line ends: its content has none."""
    line, at = _line_of(token), 0
    for child in token.children or ():
        yield line, child
        if child.type in ("softbreak", "hardbreak"):
            line += 1
        elif child.type == "code_inline":
            begin = token.content.index(child.markup, at)
            at = token.content.index(child.markup, begin + len(child.markup)) + len(child.markup)
            line += token.content.count("\n", begin, at)
