# SPDX-License-Identifier: Apache-2.0
"""Lines of at most 100 columns and sentences of at most 35 words."""

import re
from collections.abc import Iterator

from devtools.docs.findings import Finding
from devtools.docs.page import Page, without_links

MAX_COLUMNS = 100
MAX_WORDS = 35
_LINK_ALONE = re.compile(r"^\s*(?:[-*+]\s+|\d+[.)]\s+)?\S*\[[^\]]*\]\([^)]*\)\S*\s*$")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+|(?<=[.!?]\")\s+")
_CODE = re.compile(r"(`+).+?\1", re.DOTALL)


def long_lines(page: Page) -> Iterator[Finding]:
    """Code, rows of tables, HTML and what has no place to break it may be longer."""
    for line in page.prose_lines:
        text = line.text
        if len(text) <= MAX_COLUMNS or text.lstrip().startswith(("|", "<")):
            continue
        if _LINK_ALONE.match(text) or " " not in text.strip():
            continue
        yield Finding(page.name, line.line, f"the line has {len(text)} columns; wrap it at {MAX_COLUMNS}")


def long_sentences(page: Page) -> Iterator[Finding]:
    """A code span counts as one word."""
    for paragraph in page.paragraphs:
        for sentence in sentences(paragraph.text):
            words = len(sentence.split())
            if words > MAX_WORDS:
                begin = " ".join(sentence.split()[:8])
                yield Finding(
                    page.name, paragraph.line, f"a sentence has {words} words, of at most {MAX_WORDS}: {begin!r} ..."
                )


def sentences(paragraph: str) -> list[str]:
    """The sentences of one paragraph, as a reader sees them."""
    plain = _CODE.sub("code", without_links(paragraph))
    return [sentence for sentence in _END.split(plain) if sentence.strip()]
