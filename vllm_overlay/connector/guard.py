# SPDX-License-Identifier: Apache-2.0
"""The one guard through which vLLM reaches a connector's hooks. It logs and counts what a hook raises, and answers for
it."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from vllm_overlay.common.fence import SHUTDOWN

Answer = Callable[[], Any]


C = TypeVar("C", bound=type[Any])


def never_fatal(interface: type, *, answers: Mapping[str, Answer], unguarded: Collection[str]) -> Callable[[C], C]:
    """A class decorator: no exception of a method in ``answers`` leaves it, except for a shutdown's.

    ``answers`` says what each returns instead. A method ``_recover_<name>`` is called first, with the same arguments,
    and is fenced in the same way. ``hook_failed(hook, error)`` of the class hears of each exception; it must not raise.
    ``unguarded`` names the members whose exceptions are meant to be seen, or that raise none.

    Every member of ``interface`` that the class defines must be in one of the two. Raises TypeError at import when one
    is in neither.
    """

    def decorate(cls: C) -> C:
        own = {name for name in vars(cls) if not name.startswith("_") and hasattr(interface, name)}
        if forgotten := own - set(answers) - set(unguarded):
            raise TypeError(f"{cls.__name__} says nothing of what answers for {', '.join(sorted(forgotten))}")
        for name, answer in answers.items():
            setattr(cls, name, _guarded(name, vars(cls)[name], answer))
        return cls

    return decorate


def _guarded(name: str, function: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except SHUTDOWN:
            raise
        except BaseException as error:
            self.hook_failed(name, error)
        if (recover := getattr(self, f"_recover_{name}", None)) is not None:
            try:
                recover(*args, **kwargs)
            except SHUTDOWN:
                raise
            except BaseException as error:
                self.hook_failed(name, error)
        return answer()

    return guarded
