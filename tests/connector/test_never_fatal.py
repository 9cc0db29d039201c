# SPDX-License-Identifier: Apache-2.0
"""No exception of any part leaves any hook. The hooks come from vLLM's own interface, so none can be forgotten."""

import inspect
from asyncio import CancelledError
from itertools import pairwise
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector import connector as connector_module
from vllm_overlay.connector.connector import HybridOffloadConnector
from vllm_overlay.connector.guard import never_fatal
from vllm_overlay.connector.lora.metadata import AdapterCheck, AdapterWeights
from vllm_overlay.connector.metadata import OffloadMetadata, StoreJob
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.factory import tier_spec

AT_START = {
    "register_kv_caches",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "bind_kv_cache_manager",
}
"""Hooks before serving, which may refuse to start."""
ALREADY_SAFE = {"role", "clear_connector_metadata", "has_connector_metadata", "get_loaded_kv_cache_group_ids"}
"""vLLM's own, not ours: they assign, or read the configuration."""


class PanicException(BaseException):
    """As pyo3 raises it when Rust code panics: no Exception."""


class Broken:
    """A half, a request or a step's output of which nothing works."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "_error", error)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Broken
        raise object.__getattribute__(self, "_error")


def members() -> list[str]:
    """Everything of the interface that an instance has and vLLM may ask for while serving."""
    found = []
    for name in dir(KVConnectorBase_V1):
        static = inspect.getattr_static(KVConnectorBase_V1, name)
        if name.startswith("_") or isinstance(static, classmethod | staticmethod) or name in AT_START | ALREADY_SAFE:
            continue
        if isinstance(static, property) or callable(static):
            found.append(name)
    return found


def connector_with(error: BaseException, side: str) -> HybridOffloadConnector:
    """As it is while serving, with a half that raises."""
    made = object.__new__(HybridOffloadConnector)
    made._spec = tier_spec({"tier": "cpu"})
    made.settings = made._spec.settings
    made._tally = Tally()
    made._role = KVConnectorRole.SCHEDULER if side == "scheduler" else KVConnectorRole.WORKER
    made._failures_logged = set()
    half: Any = Broken(error)
    made._scheduler = half if side == "scheduler" else None
    made._worker = half if side == "worker" else None
    job: Any = StoreJob
    made._connector_metadata = OffloadMetadata(stores=(job,))
    return made


def call(made: HybridOffloadConnector, name: str, error: BaseException) -> Any:
    """Ask for a property, or call a hook with arguments of which nothing works."""
    static = inspect.getattr_static(type(made), name)
    if isinstance(static, property):
        return getattr(made, name)
    hook = getattr(made, name)
    parameters = inspect.signature(hook).parameters.values()
    given = {p.name: Broken(error) for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if "num_external_tokens" in given:
        given["num_external_tokens"] = 64  # type: ignore[assignment]
    return hook(**given)


@pytest.mark.parametrize(
    "error", [KeyError("x"), PanicException("x"), CancelledError(), GeneratorExit()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("side", ["scheduler", "worker"])
@pytest.mark.parametrize("name", members())
def test_whatever_a_part_raises_no_hook_lets_it_out(name: str, side: str, error: BaseException) -> None:
    call(connector_with(error, side), name, error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0)], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("name", "side"), [("build_connector_meta", "scheduler"), ("start_load_kv", "worker")])
def test_a_shutdown_is_let_out(name: str, side: str, error: BaseException) -> None:
    with pytest.raises(type(error)):
        call(connector_with(error, side), name, error)


@pytest.mark.parametrize(
    ("name", "side", "answer"),
    [
        ("get_num_new_matched_tokens", "scheduler", (0, False)),
        ("build_connector_meta", "scheduler", OffloadMetadata()),
        ("has_pending_push_work", "scheduler", False),
        ("reset_cache", "scheduler", False),
        ("request_finished_all_groups", "scheduler", (False, None)),
        ("completes_local_attention", "scheduler", False),
        ("get_block_ids_with_load_errors", "worker", set()),
        ("build_connector_worker_meta", "worker", None),
    ],
)
def test_what_a_hook_answers_then_does_no_harm(name: str, side: str, answer: object) -> None:
    made = connector_with(KeyError("x"), side)
    assert call(made, name, KeyError("x")) == answer
    assert made._tally.counters[f"hook_errors:{name}"] == 1


class Recorder:
    """A half that raises in one method and remembers the calls of the others."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def method(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name == self.broken:
                raise KeyError(name)

        return method


def recording(side: str, broken: str, metadata: OffloadMetadata | None = None) -> tuple[Any, Recorder]:
    made = connector_with(KeyError("x"), side)
    half: Any = Recorder(broken)
    setattr(made, f"_{side}", half)
    made._connector_metadata = metadata or OffloadMetadata()
    return made, half


def test_a_load_that_could_not_be_planned_is_told_to_its_request() -> None:
    made, half = recording("scheduler", "allocated")
    request: Any = type("Request", (), {"request_id": "r"})()
    blocks: Any = type("Blocks", (), {"blocks": ()})()
    made.update_state_after_alloc(request, blocks, 0)
    assert ("plan_failed", ("r",)) not in half.calls
    made.update_state_after_alloc(request, blocks, 64)
    assert ("plan_failed", ("r",)) in half.calls


def test_loads_that_could_not_begin_fail_and_the_step_is_known() -> None:
    metadata = OffloadMetadata(failed_loads=("r",))
    made, half = recording("worker", "begin_loads")
    made.bind_connector_metadata(metadata)
    assert made._get_connector_metadata() is metadata
    assert half.calls[1:] == [("fail_loads", ((), (), Reason.HOOK_ERROR))]


CHECK = AdapterCheck("s", AdapterWeights(1, b"digest"), frozenset({7}))
STORE: Any = StoreJob


@pytest.mark.parametrize(
    ("hook", "metadata", "calls"),
    [
        ("start_load_kv", OffloadMetadata(failed_loads=("r",)), ["begin_step", "start_loads", "fail_loads"]),
        # What was restored is not believed, and loads start.
        (
            "start_load_kv",
            OffloadMetadata(failed_loads=("r",), checks=(CHECK,), overdue_stores=(3,)),
            ["begin_step", "check_adapters", "fail_checks", "answer", "start_loads"],
        ),
        ("wait_for_save", OffloadMetadata(stores=(STORE,)), ["store", "fail_stores"]),
    ],
)
def test_what_could_not_be_done_is_told_as_failed(hook: str, metadata: OffloadMetadata, calls: list[str]) -> None:
    failed = next(name for name, after in pairwise(calls) if after.startswith("fail"))
    made, half = recording("worker", failed, metadata)
    getattr(made, hook)(*[None] * (hook == "start_load_kv"))
    assert [name for name, _ in half.calls] == calls


def test_the_loads_of_a_step_go_out_although_its_stores_cannot_be_planned() -> None:
    made, half = recording("scheduler", "plan_stores")
    half.begin_step = lambda scheduled: OffloadMetadata(failed_loads=("r",))  # type: ignore[attr-defined]
    output: Any = type("Output", (), {"num_scheduled_tokens": {}})()
    assert made.build_connector_meta(output) == OffloadMetadata(failed_loads=("r",))


def test_the_scheduler_is_closed_although_the_worker_cannot_be() -> None:
    made, half = recording("worker", "close")
    made._scheduler = half
    made.shutdown()
    assert [name for name, _ in half.calls] == ["close", "close"]


def test_a_hook_that_nothing_answers_for_is_refused_at_import() -> None:
    answers = {name: answer for name, answer in connector_module._ANSWERS.items() if name != "has_pending_push_work"}
    with pytest.raises(TypeError, match="says nothing of what answers for has_pending_push_work"):
        never_fatal(KVConnectorBase_V1, answers=answers, unguarded=connector_module._UNGUARDED)(HybridOffloadConnector)
