# SPDX-License-Identifier: Apache-2.0
"""Names in settings that stand for a class: one of ours, or anybody's by module path."""

import importlib
from typing import Generic, TypeVar

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.config import ConfigError
from vllm_overlay.settings.check import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes that one setting can name. Classes are imported when they are asked for.

    ``setting`` is the setting's name, for errors. ``known`` maps names to ``"module:Class"``. ``base`` is what a class
    must be a subclass of.
    """

    def __init__(self, setting: str, base: type[T], known: dict[str, str]) -> None:
        self._setting = setting
        self._base = base
        self._known = dict(known)

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, in order of registration."""
        return tuple(self._known)

    def register(self, name: str, path: str) -> None:
        """Called by a plug-in. ``path`` is ``"module:Class"``. Raises ConfigError when the name is another's."""
        if self._known.setdefault(name, path) != path:
            raise ConfigError(f"{self._setting}={name!r} is registered as {self._known[name]}: choose another name")

    def find(self, name: object) -> type[T]:
        """The class that the setting's value ``name`` stands for; raises ConfigError."""
        known = " or ".join(f'"{one}"' for one in self._known)
        if not isinstance(name, str) or (name not in self._known and ":" not in name):
            wrong = f'{self._setting}={name!r} is not known: set it to {known}, or to "module:Class"'
            raise ConfigError(wrong + did_you_mean(name, self._known))
        module, _, attribute = self._known.get(name, name).partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except SHUTDOWN:
            raise
        except BaseException as error:
            raise ConfigError(
                f"{self._setting}={name!r} cannot be imported: {error}; set it to {known}, or to a class that can be"
            ) from error
        if not isinstance(found, type) or not issubclass(found, self._base):
            base = self._base.__name__
            raise ConfigError(f"{self._setting}={name!r} is no {base}: name a subclass of it, or set it to {known}")
        return found
