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
_TEMPLATE = re.compile(
    r"\$\([^)]*\)|\$\{[^}]*\}|\$[A-Za-z_]\w*|\{\{.*\}\}|%[A-Za-z_]\w*%|@[A-Za-z_]\w*@|`[^`]*`|<[^>]*>|\*"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_OF_WINDOWS = re.compile(r"[a-z]:[\\/]|\\\\", re.IGNORECASE)
_SECOND = re.compile(r"[:,;]\s*/")
_SIZE = re.compile(r":\s*[0-9.]+\s*[kmgtp]i?b?$", re.IGNORECASE)
_BYTE_ORDER_MARK = "\ufeff"
logger = logging.getLogger(f"vllm.{__name__}")


def parse_path(value: str, setting: str, example: str) -> str:
    """An absolute path on this machine; ``""`` stays. Raises ConfigError naming ``setting`` and a path that works.

    A path that starts in another directory in each container, or that nobody has expanded, is another store at each
    start. So all but ``~`` is refused.
    """
    path = value.strip().strip(_BYTE_ORDER_MARK).strip()
    if not path:
        return path
    if not (wrong := _why_no_path(path, example)):
        if not path.startswith("~"):
            return path
        expanded = os.path.expanduser(path)
        _log_expanded(setting, path, expanded)
        return expanded
    why, works = wrong
    raise ConfigError(f"{setting}={value!r} {why}: set it to an absolute path such as {works!r}")


def _why_no_path(path: str, example: str) -> tuple[str, str] | None:
    """Why it cannot be taken, and what to write. None when it can."""
    if template := _TEMPLATE.search(path):
        expanded = os.path.expandvars(path)
        works = path[0] == "$" and os.path.isabs(expanded) and not _TEMPLATE.search(expanded)
        return f"holds {template[0]}, which nobody has replaced", expanded if works else example
    if control := _CONTROL.search(path):
        return f"holds the character {control[0]!r}", example
    if _OF_WINDOWS.match(path):
        return "is a path of Windows", example
    if scheme := _SCHEME.match(path):
        local = unquote(urlsplit(path).path)
        return "is a URL, and this is a path", local if scheme[1].lower() == "file" and len(local) > 1 else example
    if path[0] in "'\"":
        unquoted = path.strip("'\"")
        return "has quotes of its own", unquoted if os.path.isabs(unquoted) else example
    if second := _SECOND.search(path):
        return "is more than one path", path[: second.start()]
    if size := _SIZE.search(path):
        return "ends with a size, which has a setting of its own", path[: size.start()]
    if path.startswith("~"):
        has_home = os.path.isabs(os.path.expanduser(path))
        return None if has_home else ("is in the home of a user who has none here", example)
    if os.path.isabs(path):
        return None
    return "depends on the directory that the server is started in", str(Path.cwd() / path)


@functools.cache
def _log_expanded(setting: str, path: str, expanded: str) -> None:
    logger.info("%s=%r is %s", setting, path, expanded)
