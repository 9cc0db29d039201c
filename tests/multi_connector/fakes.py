# SPDX-License-Identifier: Apache-2.0
"""Children whose every hook is recorded, scripted and made to raise by the test, and a MultiConnector over them."""

import asyncio
import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_overlay.multi_connector import MultiConnector

BLOCK = 16


class Boom(Exception):
    """What a fake raises when told to."""


class Panic(BaseException):
    """As native code raises it: no ``Exception``."""


FAULTS = (Boom, Panic, asyncio.CancelledError, GeneratorExit)
"""What the fence holds."""

ENDINGS = (KeyboardInterrupt, SystemExit)
"""What passes it."""


def _raise(error: type[BaseException], *args: Any, **kwargs: Any) -> None:
    raise error


def breaking(instance: Any, method: str, error: type[BaseException] = Boom) -> Any:
    """``instance``, whose ``method`` raises ``error``; also on its way to another process."""
    setattr(instance, method, functools.partial(_raise, error))
    return instance


@dataclass
class FakeMetadata(KVConnectorMetadata):
    text: str = ""


@dataclass
class FakeWorkerMetadata(KVConnectorWorkerMetadata):
    items: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "FakeWorkerMetadata":
        return FakeWorkerMetadata(self.items | other.items)


@dataclass
class FakeHandshake(KVConnectorHandshakeMetadata):
    text: str


class FakeEvents(KVConnectorKVEvents):
    """Counts like vLLM's own containers: an event is common when every worker has it."""

    def __init__(self, events: Iterable[str]) -> None:
        self.events, self.workers = list(events), 1

    def add_events(self, events: list[Any]) -> None:
        self.events += events

    def aggregate(self) -> "FakeEvents":
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_all_events(self) -> list[Any]:
        return list(self.events)

    def get_number_of_workers(self) -> int:
        return self.workers

    def clear_events(self) -> None:
        self.events = []


class FakeStats(KVConnectorStats):
    """``data`` = {"loads": number}."""

    def aggregate(self, other: KVConnectorStats) -> "FakeStats":
        self.data["loads"] += other.data["loads"]
        return self

    def reduce(self) -> dict[str, int | float]:
        return {"loads": self.data["loads"]}

    def reset(self) -> None:
        self.data["loads"] = 0

    def is_empty(self) -> bool:
        return not self.data["loads"]

    def to_dict(self) -> dict[str, Any]:
        return self.data


class FakePromMetrics(KVConnectorPromMetrics):
    """Written as vLLM's own connectors write theirs: no label ``connector``."""

    name, own_label = "vllm:fake_loads", "kind"

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.value = vllm_config.kv_transfer_config.kv_connector_extra_config["name"]
        labels = [*labelnames, self.own_label]
        self.loads = self._counter_cls(name=self.name, documentation="d", labelnames=labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = *self.per_engine_labelvalues[engine_idx], self.value
        self.loads.labels(*labels).inc(transfer_stats_data["loads"])


class NamedPromMetrics(FakePromMetrics):
    """Written as ours: with a label ``connector`` of its own."""

    name, own_label = "vllm:named_loads", "connector"


def public_hooks() -> dict[str, Any]:
    """Every public name of vLLM's connector interface, as the class has it."""
    names = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in dir(cls) if not name.startswith("_")}
    return {
        name: inspect.getattr_static(KVConnectorBase_V1, name, inspect.getattr_static(SupportsHMA, name, None))
        for name in sorted(names)
    }


class FakeBase(KVConnectorBase_V1):
    """``answers``: hook -> value or function of the arguments. ``raising``: hooks that raise ``error``.

    ``calls``: what came.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "boom" in extra:
            raise extra["boom"]("__init__")
        if extra.get("wants_recompute"):
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self.answers: dict[str, Any] = {
            "get_num_new_matched_tokens": (0, False),
            "build_connector_meta": lambda output: FakeMetadata(extra.get("name", "")),
            "request_finished": (False, None),
            "request_finished_all_groups": (False, None),
        }
        self.raising: set[str] = set()
        self.error: type[BaseException] = Boom
        self.calls: list[tuple[Any, ...]] = []

    def called(self, hook: str) -> list[tuple[Any, ...]]:
        return [args for name, *args in self.calls if name == hook]


def _hook(name: str) -> Any:
    abstract = name in KVConnectorBase_V1.__abstractmethods__

    def hook(self: FakeBase, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((name, *args))
        if name in self.raising:
            raise self.error(name)
        if name in self.answers:
            answer = self.answers[name]
            return answer(*args) if callable(answer) else answer
        return None if abstract else getattr(KVConnectorBase_V1, name)(self, *args, **kwargs)

    return hook


def _property(name: str) -> Any:
    def read(self: FakeBase) -> Any:
        if name in self.raising:
            raise self.error(name)
        return self.answers.get(name, False)

    return property(read)


for _name, _member in public_hooks().items():
    if isinstance(_member, property) and _name != "role":
        setattr(FakeBase, _name, _property(_name))
    elif inspect.isfunction(_member) and _name not in ("has_connector_metadata", "request_finished_all_groups"):
        setattr(FakeBase, _name, _hook(_name))
FakeBase.__abstractmethods__ = frozenset()


class FakeChild(FakeBase, SupportsHMA):
    """A child with hybrid support."""

    request_finished_all_groups = _hook("request_finished_all_groups")

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return FakeStats(data=data or {"loads": 0})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> KVConnectorPromMetrics | None:
        return FakePromMetrics(vllm_config, *args)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return vllm_config.kv_transfer_config.kv_connector_extra_config.get("layout")

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise"))


class NamedChild(FakeChild):
    """A child whose metrics carry its name, as HybridOffloadConnector's do."""

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> KVConnectorPromMetrics | None:
        return NamedPromMetrics(vllm_config, *args)


class Impostor:
    """Rebuilds stats as a connector would, but is none."""

    build_kv_connector_stats = FakeChild.build_kv_connector_stats


class PlainChild(FakeBase):
    """A child without hybrid support."""


class UnstoppableChild(FakeChild):
    """A child without a shutdown of its own, and with transfers that nobody can end for it."""

    shutdown = KVConnectorBase_V1.shutdown


class OldPreemptionChild(FakeChild):
    """A child from when handle_preemptions took request ids."""

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:  # type: ignore[override]
        self.calls.append(("handle_preemptions", preempted_req_ids))


def child(name: str | None = None, cls: str = "FakeChild", weight: Any = None, **extra: Any) -> dict[str, Any]:
    """One entry of ``connectors``."""
    if name is not None:
        extra["name"] = name
    if weight is not None:
        extra["load_weight"] = weight
    return {"kv_connector": cls, "kv_connector_module_path": __name__, "kv_connector_extra_config": extra}


def vllm_config(*children: dict[str, Any], hybrid: bool = True, policy: str = "fail", **settings: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_module_path="vllm_overlay.multi_connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": list(children), **settings},
    )
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    return SimpleNamespace(kv_transfer_config=transfer, scheduler_config=scheduler)


def cache_config(recurrent: bool = False) -> Any:
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    mamba = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
    specs = [attention, *([mamba] if recurrent else [])]
    found = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=found, prefix_cacheable_group_ids=(7,))


def multi(
    *children: dict[str, Any],
    role: KVConnectorRole = KVConnectorRole.SCHEDULER,
    recurrent: bool = False,
    **settings: Any,
) -> MultiConnector:
    """A MultiConnector; by default over the children ``a`` and ``b``."""
    found = children or (child("a"), child("b"))
    return MultiConnector(vllm_config(*found, **settings), role, cache_config(recurrent))


def worker(*children: dict[str, Any], **settings: Any) -> MultiConnector:
    return multi(*children, role=KVConnectorRole.WORKER, **settings)


def request(request_id: str = "r", num_tokens: int = 1000, junction: int = 0) -> Any:
    return SimpleNamespace(
        request_id=request_id, num_tokens=num_tokens, shared_prefix_boundary=junction, kv_transfer_params=None
    )


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def cache_manager(*block_sizes: int) -> Any:
    """vLLM's, as far as it is asked: the block size of each group."""
    managers = [SimpleNamespace(block_size=block_size) for block_size in block_sizes]
    return SimpleNamespace(block_pool="pool", coordinator=SimpleNamespace(single_type_managers=managers))


def scheduler_output(preempted: Iterable[str] = ()) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = set(preempted)
    return output
