# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a page, and where."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, order=True)
class Finding:
    """One thing that is wrong. ``page`` is relative to the repository; ``line`` begins at 1."""

    page: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.what}"
