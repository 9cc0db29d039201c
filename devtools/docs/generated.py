# SPDX-License-Identifier: Apache-2.0
"""Parts of a page that a command writes: each stands between two comments, NAME:begin and NAME:end."""

import re
from collections.abc import Mapping

_PART = re.compile(r"(<!-- (\w+):begin [^\n]*-->\n)(.*?)(<!-- \2:end -->\n)", re.DOTALL)


def parts_of(text: str) -> dict[str, str]:
    return {part[2]: part[3] for part in _PART.finditer(text)}


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """The page with these parts in place of its own. Raises KeyError for a part that is not among them."""
    return _PART.sub(lambda part: part[1] + parts[part[2]] + part[4], text)
