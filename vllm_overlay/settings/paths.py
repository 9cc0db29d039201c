# SPDX-License-Identifier: Apache-2.0
"""A path in a setting, as people and charts write it."""

import functools
import logging
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vllm_overlay.config import ConfigError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):/", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\([^)]*\)|\$\{[^}]*\}|\$[A-Za-z_]\w*|\{\{.*\}\}|%[A-Za-z_]\w*%|<[^>]*>")
logger = logging.getLogger(f"vllm.{__name__}")


def parse_path(value: str, setting: str, example: str) -> str:
    """An absolute path on this machine; ``""`` stays. Raises ConfigError naming ``setting`` and a path that works.

    A path that starts in another directory in each container, or that nobody has expanded, is another store at each
    start. So all but ``~`` is refused.
    """
    path = value.strip()
    if not path or (os.path.isabs(path) and not _TEMPLATE.search(path) and "\0" not in path):
        return path
    if path.startswith("~") and os.path.isabs(expanded := os.path.expanduser(path)) and not _TEMPLATE.search(path):
        _log_expanded(setting, path, expanded)
        return expanded
    why, works = _why_no_path(path, example)
    raise ConfigError(f"{setting}={value!r} {why}: set it to an absolute path such as {works!r}")


def _why_no_path(path: str, example: str) -> tuple[str, str]:
    """Why it cannot be taken, and what to write."""
    if template := _TEMPLATE.search(path):
        expanded = os.path.expandvars(path)
        works = path[0] == "$" and os.path.isabs(expanded) and not _TEMPLATE.search(expanded)
        return f"holds {template[0]}, which nobody has replaced", expanded if works else example
    if "\0" in path:
        return "holds a null character", example
    if scheme := _SCHEME.match(path):
        local = unquote(urlsplit(path).path)
        return "is a URL, and this is a path", local if scheme[1].lower() == "file" and len(local) > 1 else example
    if path[0] in "'\"":
        unquoted = path.strip("'\"")
        return "has quotes of its own", unquoted if os.path.isabs(unquoted) else example
    if path.startswith("~"):
        return "is in the home of a user who has none here", example
    return "depends on the directory that the server is started in", str(Path.cwd() / path)


@functools.cache
def _log_expanded(setting: str, path: str, expanded: str) -> None:
    logger.info("%s=%r is %s", setting, path, expanded)
