# SPDX-License-Identifier: Apache-2.0
"""The hooks of vLLM's connector interface: those that do something, how long they take, and one that hangs.

A hook runs on the thread that called it, because a worker's current stream and inference mode are that thread's. So a
hook that never returns stops the engine whatever we do. What we can do is name the child and the hook.
"""

import inspect
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.logger import init_logger

# Below vLLM's own logger, whose handlers and level it shares.
logger = init_logger(f"vllm.{__name__}")

LAYER_HOOKS = frozenset({"wait_for_layer_load", "save_kv_layer"})
"""Hooks that an engine calls for each layer of each step."""
LOOKUP = "get_num_new_matched_tokens"
"""The hook that a request waits for before it is scheduled."""

NOT_CALLED = {
    "role": "the same as our own",
    "has_connector_metadata": "says whether ours is bound, and ours holds the children's",
    "get_finished": "get_transfer_results is asked",
    "get_finished_count": "asked at start",
    "get_mem_pool_context": "asked at start",
    "requires_kv_delivery": "asked at start",
    "bind_gpu_block_pool": "called at start; an instance that comes back gets it with bind_kv_cache_manager",
    "set_xfer_handshake_metadata": "called at start; an instance that comes back gets the other form of it",
}
"""Hooks that no instance of a child meets while it serves or comes back, and why. A failure at start is a refusal."""


def _hooks() -> tuple[str, ...]:
    members = {
        name: inspect.getattr_static(cls, name)
        for cls in (SupportsHMA, KVConnectorBase_V1)
        for name in dir(cls)
        if not name.startswith("_")
    }
    of_an_instance = {name for name, member in members.items() if not isinstance(member, classmethod)}
    return ("__init__", *sorted(of_an_instance - NOT_CALLED.keys()))


HOOKS = _hooks()
"""The values of the metric label ``hook``. ``__init__`` is the construction of an instance that comes back."""

_MAY_BE_EMPTY = (
    *(*LAYER_HOOKS, "handle_preemptions", "finish_forward", "reset_capture_state"),
    *("get_kv_connector_kv_cache_events", "build_connector_worker_meta", "get_kv_connector_stats"),
    *("on_new_request", "update_connector_output", "take_events"),
    *("has_pending_push_work", "has_pending_block_frees"),
)
"""Hooks that many connectors have no use for. Those that vLLM's interface does not leave to them do nothing there."""


def empty_hooks(connector: object) -> frozenset[str]:
    """Hooks that this instance has from vLLM's interface, or that are marked ``empty_hook``.

    They need not be called. Runs no code of the connector. One that finds its attributes its own way may have any hook.
    """
    if type(connector).__getattribute__ is not object.__getattribute__:
        return frozenset()
    own = {name: inspect.getattr_static(connector, name, None) for name in _MAY_BE_EMPTY}
    return frozenset(
        name
        for name, method in own.items()
        if method is vars(KVConnectorBase_V1)[name] or getattr(method, "is_empty_hook", False) is True
    )


Call = tuple[str, str, float, int]
"""Child, hook, when it began, and the thread that it is called on."""


class Watchdog:
    """One per MultiConnector. Who calls a hook says so in ``call``, which costs well under a microsecond."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: a call that lasts longer is reported. With 0 none is."""
        self.limit_s = limit_s or math.inf
        """Seconds after which a hook hangs."""
        self.clock = clock
        self.call: Call | None = None
        """The hook that is being called."""
        self.needs_thread = limit_s > 0
        """Whether ``start`` is to be called before the first hook."""
        self._reported: Call | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on a hook that hangs is named."""
        self.needs_thread = False
        self._thread = threading.Thread(target=self._watch, name="multi-connector-watchdog", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads; how long hooks take is still measured
            logger.error("The watchdog has no thread, so hooks that hang are not named: %s", error)

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self.limit_s / 4):
            self.look()

    def look(self) -> None:
        """Reports the present call once if it has lasted too long."""
        call = self.call
        if call is None or call is self._reported:
            return
        child, hook, started, thread_id = call
        seconds = self.clock() - started
        if seconds <= self.limit_s:
            return
        self._reported = call
        logger.error(
            "Connector %r has not returned from %s for %.1f s (hang_after_s). The engine waits for it here:\n%s",
            child,
            hook,
            seconds,
            _stack_of(thread_id),
        )


def _stack_of(thread_id: int) -> str:
    """Where a thread is now."""
    frame = sys._current_frames().get(thread_id)
    return "".join(traceback.format_stack(frame)[-12:]) if frame is not None else "(its thread is gone)"
