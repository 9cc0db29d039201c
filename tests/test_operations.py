# SPDX-License-Identifier: Apache-2.0
"""What docs/operations.md quotes of the log and of refusals is what the code says."""

import ast
import re
from collections.abc import Iterator

from tests.python_path import REPOSITORY
from tests.test_versions import rows_of
from vllm_overlay.common.reasons import DROPPED_STORES, FAILED_LOADS

PAGE = REPOSITORY / "docs" / "operations.md"
QUOTING = ("the sentence says", "the log says")
"""First column of the tables that quote."""


def quotes() -> list[str]:
    """The quoted words, in the order of the page."""
    found, is_quoting = [], False
    for line in PAGE.read_text().splitlines():
        first = line.strip("|").split("|")[0].strip()
        is_quoting = line.startswith("|") and (is_quoting or first in QUOTING)
        found += re.findall(r"`([^`]+)`", first) if is_quoting else []
    return found


def texts() -> Iterator[str]:
    """Every string of the package, those in f-strings between their fields."""
    for path in (REPOSITORY / "vllm_overlay").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_quoted_line_is_one_that_the_code_has() -> None:
    said = "\n".join(texts())
    assert len(quotes()) > 20
    assert [quote for quote in quotes() if quote not in said] == []


def reasons(heading: str) -> set[str]:
    """The reasons in the first column of the table below a heading."""
    return {word for row in rows_of(PAGE, heading) for word in re.findall(r"`(\w+)`", row[0])}


def test_every_reason_says_what_to_do() -> None:
    assert reasons("Why do loads fail?") == FAILED_LOADS
    assert reasons("Why are stores dropped?") == DROPPED_STORES
