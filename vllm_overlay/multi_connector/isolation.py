# SPDX-License-Identifier: Apache-2.0
"""One child and the fence around it: whatever it raises is logged, counted and answered for, never passed on.

Two kinds of hooks, two consequences:

- A hook in ``TOLERATED`` only asks or only informs. When it raises, a neutral answer is used and the child stays.
- Any other hook changes the child's books or moves bytes. A child that raised there has done an unknown part of its
  work, so it is *isolated*: no hook of it is called any more in this process, and the MultiConnector isolates it on the
  scheduler and on every worker. Blocks it may still touch are given back only once its worker side has been shut down
  (vLLM's interface: shutdown() ends its asynchronous operations). If that raises too, the child is *stuck*: what it
  holds stays held.

An isolated child does not come back yet; that needs a new instance, in step on scheduler and workers. A hook that
hangs is not bounded yet. Both are where this module is meant to grow.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from vllm.logger import init_logger

from vllm_overlay.multi_connector.stats import Counters

# Below vLLM's own logger, whose handlers and level it shares.
logger = init_logger(f"vllm.{__name__}")
Answer = TypeVar("Answer")

TOLERATED = frozenset(
    {
        "get_num_new_matched_tokens",  # the interface calls it side-effect free; the answer becomes 0
        "get_loaded_kv_cache_group_ids",
        "get_external_cache_hit_sources",
        "supports_divergent_local_hybrid_hits",
        "has_pending_block_frees",
        "has_pending_push_work",
        "take_events",
        "get_kv_connector_stats",
        "get_kv_connector_kv_cache_events",
    }
)
"""Hooks whose exception leaves the child's books whole. A hook that is not listed isolates, so a new one is safe."""


class Child:
    """A child connector under its configured name. One per child and process."""

    __slots__ = (
        "_logged",
        "connector",
        "counters",
        "index",
        "isolated",
        "name",
        "stopped",
        "stuck",
        "wants_preempted_ids",
        "weight",
    )

    def __init__(self, index: int, name: str, weight: float, connector: Any) -> None:
        self.index, self.name, self.weight, self.connector = index, name, weight, connector
        self.counters = Counters()
        self.isolated = self.stopped = self.stuck = False
        self.wants_preempted_ids = _wants_preempted_ids(connector)
        self._logged: set[str] = set()

    def call(
        self,
        hook: str,
        default: Answer,
        *args: Any,
        parse: Callable[[Any], Answer] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Answer:
        """The child's answer to ``hook(*args, **options)``, or ``default`` when it is isolated or raises.

        ``parse`` checks and converts the answer inside the fence: what it raises counts as the hook's exception.
        """
        if self.isolated:
            return default
        try:
            answer = getattr(self.connector, hook)(*args, **options)
            return parse(answer) if parse is not None else answer
        except Exception as error:
            self.failed(hook, error)
            return default

    def read(self, hook: str, default: Answer) -> Answer:
        """As ``call`` for a property."""
        if self.isolated:
            return default
        try:
            answer: Answer = getattr(self.connector, hook)
            return answer
        except Exception as error:
            self.failed(hook, error)
            return default

    def start(self, hook: str, *args: Any) -> Any:
        """As ``call`` for a hook that runs before serving; see ``at_start``."""
        return at_start(self.name, hook, lambda: getattr(self.connector, hook)(*args))

    def failed(self, hook: str, error: Exception) -> None:
        """Counts and logs one exception, and isolates the child unless the hook is one to tolerate."""
        self.counters.count_error(hook)
        self.log_once(hook, "raised in %s; it is logged once and counted from here on.", hook, exc_info=error)
        if hook not in TOLERATED:
            self.isolate(f"it raised in {hook}")

    def isolate(self, reason: str) -> None:
        """Takes the child out of service in this process. Its asynchronous transfers may still run."""
        if not self.isolated:
            self.isolated = True
            self.counters.isolations += 1
            self.log_once("isolated", "is out of service in this process: %s.", reason)

    def stop(self) -> None:
        """Worker side: shuts an isolated child down, once, so that nothing of it touches a block any more."""
        if self.stopped or self.stuck:
            return
        try:
            self.connector.shutdown()
            self.stopped = True
        except Exception as error:
            self.stuck = True
            self.counters.count_error("shutdown")
            self.log_once("shutdown", "could not be shut down; the blocks it holds stay held.", exc_info=error)

    def log_once(self, topic: str, message: str, *args: object, exc_info: Exception | None = None) -> None:
        if topic not in self._logged:
            self._logged.add(topic)
            logger.error("Connector %r " + message, self.name, *args, exc_info=exc_info)


def at_start(name: str, hook: str, action: Callable[[], Answer]) -> Answer:
    """Runs a child's hook before serving: an exception becomes a refusal that names child and hook."""
    try:
        return action()
    except Exception as error:
        raise RuntimeError(f"connector {name!r} of the MultiConnector failed in {hook}: {error}") from error


def _wants_preempted_ids(connector: Any) -> bool:
    """Whether ``handle_preemptions`` is the older one that takes ``set[str]`` instead of the metadata."""
    try:
        (parameter, *_) = inspect.signature(connector.handle_preemptions).parameters.values()
    except (TypeError, ValueError):
        return False
    return "req" in parameter.name or str(parameter.annotation).startswith("set[")
