# SPDX-License-Identifier: Apache-2.0
"""A real tier whose hooks can be made to fail while it serves: every hook of vLLM's interface, by introspection."""

import functools
import inspect
import random
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from vllm_overlay.connector.connector import HybridOffloadConnector

KINDS = ("raises", "raises once", "returns garbage", "hangs")
HANG_S = 2.5
GARBAGE: tuple[Any, ...] = (
    None,
    object(),
    -1,
    float("nan"),
    "garbage",
    b"",
    (),
    {},
    [object()],
    (1, 2, 3),
    (-1, True),
    (10**9, True),
    (64, True),
    ("64", None),
    (object(), object()),
    lambda: None,
    KVConnectorMetadata(),
    KVConnectorTransferResults({"x"}, {"y"}, {"z"}),
    KVConnectorTransferResults({1}, {None}, {object()}),
)


class Broken(Exception):
    """What a faulty hook raises."""


@dataclass
class Fault:
    """One cell of the matrix. ``fired`` counts how often it took effect."""

    hook: str
    kind: str
    role: str
    seed: int = 0
    fired: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.hook} {self.kind} {self.role} {self.seed}")

    def meets(self, hook: str, role: KVConnectorRole) -> bool:
        return (
            hook == self.hook
            and role.name.lower() == self.role
            and not (self.kind in ("raises once", "hangs") and self.fired)
        )

    def strike(self, real: Any) -> Any:
        """In place of the hook ``real``, which it may call, so that a part of the work is done before it fails."""
        self.fired += 1
        if self.kind == "hangs":
            time.sleep(HANG_S)
            return real()
        if self._random.random() < 0.5:
            real()
        if self.kind == "returns garbage":
            return self._random.choice(GARBAGE)
        raise Broken(self.hook)


class Faulty(HybridOffloadConnector):
    """One fault at a time, for all instances in the process."""

    fault: ClassVar[Fault | None] = None
    also: ClassVar[Fault | None] = None
    """A second one, to bring about what the first one needs."""


def _strike(self: Any, hook: str, role: KVConnectorRole, real: Any) -> Any:
    for fault in (Faulty.fault, Faulty.also):
        if fault is not None and fault.meets(hook, role):
            return fault.strike(real)
    return real()


def _faulty_method(name: str) -> Any:
    inherited = getattr(HybridOffloadConnector, name)

    @functools.wraps(inherited)
    def hook(self: Faulty, *args: Any, **kwargs: Any) -> Any:
        return _strike(self, name, self._role, functools.partial(inherited, self, *args, **kwargs))

    return hook


def _faulty_property(name: str) -> property:
    inherited = inspect.getattr_static(HybridOffloadConnector, name)
    return property(lambda self: _strike(self, name, self._role, lambda: inherited.fget(self)))


def hooks() -> list[str]:
    """Every instance-level name of vLLM's interface, and the constructor."""
    names = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in dir(cls) if not name.startswith("_")}
    members = {name: inspect.getattr_static(HybridOffloadConnector, name) for name in names}
    return ["__init__", *sorted(name for name, member in members.items() if not isinstance(member, classmethod))]


def _construct(self: Faulty, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
    _strike(
        self,
        "__init__",
        role,
        lambda: HybridOffloadConnector.__init__(self, vllm_config, role, kv_cache_config),
    )


Faulty.__init__ = _construct  # type: ignore[method-assign]
for _name in hooks()[1:]:
    if _name == "role":
        continue  # the connector's own attribute, which this module reads to know where it is
    _member = inspect.getattr_static(HybridOffloadConnector, _name)
    setattr(Faulty, _name, _faulty_property(_name) if isinstance(_member, property) else _faulty_method(_name))
