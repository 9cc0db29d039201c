# SPDX-License-Identifier: Apache-2.0
"""The file with which an operator changes children's switches while the server runs.

    {"disk": {"store": false}, "cpu": {"min_tokens": 512}}

A JSON object: child name -> any of ``min_tokens``, ``store``, ``load``. What it does not name is as configured; a file
that is not there changes nothing. It is looked at once a second while requests are served, in the scheduler's process.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from vllm.logger import init_logger

from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.settings import ChildSettings
from vllm_overlay.settings.check import checked, did_you_mean

logger = init_logger(f"vllm.{__name__}")

LOOK_EVERY_S = 1.0
_SWITCHES = ("min_tokens", "store", "load")


def warn_of_missing_directory(path: str) -> None:
    """Says so when ``path`` lies in no directory: it may be made later, or it is a slip. An empty path is neither.

    Called at start in the scheduler's process alone: others may run on another machine.
    """
    directory = os.path.dirname(os.path.abspath(path))
    if path and not os.path.isdir(directory):
        logger.warning(
            "control_file=%r of the MultiConnector lies in %r, which is not there. Until it is, the children's "
            "switches are as configured.", path, directory
        )  # fmt: skip


def read_switches(content: bytes, configured: Mapping[str, ChildSettings]) -> dict[str, ChildSettings]:
    """Every child's settings under this content; raises ConfigError with a sentence."""
    try:
        given = msgspec.json.decode(content, type=dict[str, dict[str, Any]])
    except msgspec.ValidationError as error:
        example = '{"cpu": {"store": false}}'
        raise ConfigError(f"it must be an object that has an object for each child, such as {example}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"it is no JSON: {error}") from error
    if unknown := sorted(set(given) - set(configured)):
        near = did_you_mean(unknown[0], configured)
        raise ConfigError(f"there is no child {unknown[0]!r}: its children are {', '.join(configured)}{near}")
    settings = dict(configured)
    for name, switches in given.items():
        if wrong := sorted(set(switches) - set(_SWITCHES)):
            near = did_you_mean(wrong[0], _SWITCHES)
            raise ConfigError(f"{wrong[0]!r} of {name!r} cannot be changed: {', '.join(_SWITCHES)} can{near}")
        settings[name] = checked({**msgspec.structs.asdict(configured[name]), **switches}, ChildSettings, repr(name))
    return settings


class ControlFile:
    """The present settings of every child. A bad file changes nothing but warns; without a file, as configured."""

    def __init__(self, path: str, configured: Mapping[str, ChildSettings]) -> None:
        """``path`` may be empty: then the settings never change."""
        self._path = Path(path) if path else None
        self._configured = dict(configured)
        self._seen: tuple[int, int, int] | str | None = None
        self._looked_at = float("-inf")
        self.settings = self._configured

    def look(self, now: float) -> None:
        """Called often. Reads the file if it has changed, at most once a second."""
        if self._path is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        if (seen := self._state()) == self._seen:
            return
        self._seen = seen
        if seen is None:
            self.settings = self._configured
            logger.info("%s is gone: the children's switches are as configured", self._path)
            return
        try:
            self.settings = read_switches(self._path.read_bytes(), self._configured)
            logger.info("%s: the children's switches are now %s", self._path, self._changed())
        except Exception as error:  # besides ConfigError and OSError say MemoryError: no file ends the engine
            logger.warning("%s changes nothing, the last good switches hold: %s", self._path, error)

    def _state(self) -> tuple[int, int, int] | str | None:
        """Another one when the file must be read again: None without a file, a word where the system does not say."""
        assert self._path is not None
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return str(error)
        return stat.st_ctime_ns, stat.st_size, stat.st_ino  # also a mode that now allows to read it

    def _changed(self) -> dict[str, dict[str, object]]:
        return {
            name: {switch: getattr(settings, switch) for switch in _SWITCHES}
            for name, settings in self.settings.items()
        }
