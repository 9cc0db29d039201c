# SPDX-License-Identifier: Apache-2.0
"""One Markdown page: its headings, links and code, each with its line."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
_HTML_LINK = re.compile(r"<(?:a|img)\s[^>]*(?:href|src)=\"([^\"]+)\"")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


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
class CodeBlock:
    """A fenced block. ``line`` is that of its first line of code; ``language`` is empty if none is named."""

    line: int
    language: str
    text: str


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
        blocks: list[CodeBlock] = []
        begin, fence, language = 0, "", ""
        for number, line in enumerate(self.lines, 1):
            found = _FENCE.match(line)
            if fence and found and found[1].startswith(fence) and not found[2]:
                blocks.append(CodeBlock(begin, language, "\n".join(self.lines[begin - 1 : number - 1])))
                fence = ""
            elif not fence and found:
                begin, fence, language = number + 1, found[1], found[2]
        return blocks

    @cached_property
    def code_lines(self) -> set[int]:
        """The lines of fenced blocks, with the fences."""
        return {
            number
            for block in self.code_blocks
            for number in range(block.line - 1, block.line + block.text.count("\n") + 2)
        }

    @cached_property
    def prose_lines(self) -> list[Text]:
        """Every line outside fenced code; comments are blank."""
        bare = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), self.text).splitlines()
        return [Text(number, line) for number, line in enumerate(bare, 1) if number not in self.code_lines]

    @cached_property
    def headings(self) -> list[Text]:
        return [Text(line.line, found[2]) for line in self.prose_lines if (found := _HEADING.match(line.text))]

    @cached_property
    def anchors(self) -> set[str]:
        """What ``#...`` can name: GitHub's anchor of each heading, and explicit ones."""
        anchors = {found for line in self.prose_lines for found in _ANCHOR.findall(line.text)}
        seen: Counter[str] = Counter()
        for heading in self.headings:
            slug = anchor_of(heading.text)
            anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        return anchors

    @cached_property
    def links(self) -> list[Text]:
        """The targets of links and images."""
        return [
            Text(block.line + block.text[:place].count("\n"), target)
            for block in self._blocks()
            for place, target in sorted(_targets(_without_code(block.text)))
        ]

    @cached_property
    def code_spans(self) -> list[Text]:
        """What stands in backticks outside fenced blocks."""
        return [
            Text(block.line + block.text[: found.start()].count("\n"), " ".join(found[2].split()))
            for block in self._blocks()
            for found in _CODE.finditer(block.text)
        ]

    def _blocks(self) -> Iterator[Text]:
        """Runs of lines that belong together; each row of a table and each heading is one of its own."""
        begin, lines, last = 0, list[str](), 0
        for line in [*self.prose_lines, Text(len(self.lines) + 2, "")]:
            text = re.sub(r"^\s*>\s?", "", line.text)
            alone = text.lstrip().startswith("|") or _HEADING.match(text) is not None
            if lines and (not text.strip() or alone or _ITEM.match(text) or line.line != last + 1):
                yield Text(begin, "\n".join(lines))
                lines = []
            if not text.strip():
                continue
            if alone:
                yield Text(line.line, text)
                continue
            if not lines:
                begin = line.line
            lines.append(text)
            last = line.line


def anchor_of(heading: str) -> str:
    """GitHub's anchor of a heading."""
    shown = _LINK.sub(lambda found: found[1], heading)
    kept = re.sub(r"[^\w\- ]", "", shown.replace("`", "").lower())
    return kept.replace(" ", "-")


def _without_code(text: str) -> str:
    """Code spans lose what could be read as a link."""
    return _CODE.sub(lambda found: re.sub(r"[\[\]()<]", "x", found[0]), text)


def _targets(text: str) -> list[tuple[int, str]]:
    """Where each begins, and what it names; also of an image inside a link, because its words are looked through."""
    found: list[tuple[int, str]] = []
    for link in _LINK.finditer(text):
        found.append((link.start(), link[2]))
        found += [(link.start(1) + place, target) for place, target in _targets(link[1])]
    return found + [(link.start(), link[1]) for link in _HTML_LINK.finditer(text)]
