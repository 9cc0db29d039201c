# SPDX-License-Identifier: Apache-2.0
"""Real connectors whose hooks can be made to fail while they serve: all of vLLM's interface, by introspection."""

import functools
import inspect
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tests.multi_connector.fakes import Boom, Panic, public_hooks
from vllm_overlay.connector.connector import HybridOffloadConnector

KINDS = ("raises", "raises once", "panics", "returns garbage", "hangs")
HANG_AFTER_S, HANG_S = 30.0, 31.0
"""The first as ``hang_after_s``: no hook hangs but the one that says so."""
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


AT_RETURN = (
    *("__init__", "register_kv_caches", "get_handshake_metadata", "bind_kv_cache_manager", "bind_gpu_block_pool"),
    *("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "set_host_xfer_buffer_ops", "shutdown"),
)
"""Hooks that an instance meets once, when it is stopped or comes back: another fault has to bring that about.

Garbage from them comes after their work: an instance that silently does nothing there is no faulty one that could be
told from a right one, but a connector that never has anything.
"""


class HookClock:
    """Hooks take no time by it, but for one that hangs."""

    now: ClassVar[float] = 0.0

    @staticmethod
    def measure(*connectors: Any) -> None:
        """From now on it measures the hooks of these MultiConnectors' children."""
        for connector in connectors:
            connector._watchdog.clock = lambda: HookClock.now


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
            HookClock.now += HANG_S
            return real()
        if self._random.random() < 0.5 or (self.kind == "returns garbage" and self.hook in AT_RETURN):
            real()
        if self.kind == "returns garbage":
            return self._random.choice(GARBAGE)
        raise Panic(self.hook) if self.kind == "panics" else Boom(self.hook)


class Faults:
    """What is wrong now, with every faulty child in the process."""

    fault: ClassVar[Fault | None] = None
    also: ClassVar[Fault | None] = None
    """A second one, to bring about what the first one needs."""
    _seen: ClassVar[str] = ""

    @classmethod
    def look(cls) -> None:
        """With several processes: the fault is what the file says that FAULT_FILE names, ``rank`` whose it is."""
        path = os.environ.get("FAULT_FILE")
        text = Path(path).read_text() if path and os.path.exists(path) else ""
        if path and text != cls._seen:
            cls._seen, cls.fault = text, None
            if text:
                wanted = json.loads(text)
                if wanted.pop("rank") == torch_rank():
                    cls.fault = Fault(**wanted)


def torch_rank() -> int:
    """This process's rank; 0 in the scheduler's."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _strike(hook: str, role: KVConnectorRole, real: Any) -> Any:
    Faults.look()
    for fault in (Faults.fault, Faults.also):
        if fault is not None and fault.meets(hook, role):
            return fault.strike(real)
    return real()


def _faulty_method(name: str, inherited: Any) -> Any:
    @functools.wraps(inherited)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _strike(name, self._role, functools.partial(inherited, self, *args, **kwargs))

    hook.is_empty_hook = False  # type: ignore[attr-defined]  # or one that does nothing in ours would not be called
    return hook


def _faulty_property(name: str, inherited: property) -> property:
    return property(lambda self: _strike(name, self._role, lambda: inherited.__get__(self)))


def hooks() -> list[str]:
    """Every instance-level name of vLLM's interface, and the constructor."""
    return ["__init__", *(name for name, member in public_hooks().items() if not isinstance(member, classmethod))]


def _faulty(base: type[Any]) -> type[Any]:
    """``base`` with every hook of the interface made breakable."""

    def construct(self: Any, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        _strike("__init__", role, lambda: base.__init__(self, vllm_config, role, kv_cache_config))

    body: dict[str, Any] = {"__init__": construct, "__module__": __name__}
    for name in hooks()[1:]:
        if name == "role":
            continue  # the connector's own attribute, which this module reads to know where it is
        member = inspect.getattr_static(base, name)
        make: Any = _faulty_property if isinstance(member, property) else _faulty_method
        body[name] = make(name, member)
    return type(f"Faulty{base.__name__}", (base,), body)


FaultyHybridOffloadConnector = _faulty(HybridOffloadConnector)
FaultyOffloadingConnector = _faulty(OffloadingConnector)
