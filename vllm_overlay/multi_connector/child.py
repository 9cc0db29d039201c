# SPDX-License-Identifier: Apache-2.0
"""One child and the fence around it. What the child raises or garbles is logged, counted and answered for.

A child that raised, or answered what cannot be an answer, has done an unknown part of its work, so it is *isolated*: no
hook of it is called any more, here and (supervisor.py) in all processes. It comes back as a new instance. Blocks that
the old one may still touch are given back only once it cannot touch them: see ``WorkerSide``.

The fence holds every exception, also those of native code that are no ``Exception``; common/fence.py says which pass.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.multi_connector.hook_times import HookTimes
from vllm_overlay.multi_connector.hooks import LOOKUP, empty_hooks
from vllm_overlay.multi_connector.watchdog import Watchdog
from vllm_overlay.tally import Tally

# Below vLLM's own logger, whose handlers and level it shares.
logger = init_logger(f"vllm.{__name__}")
Result = TypeVar("Result")
_NO_OPTIONS: Mapping[str, Any] = {}


class Child:
    """A child connector under its configured name. One per child and process; its instances come and go."""

    __slots__ = (
        "_build",
        "_logged",
        "_watchdog",
        "connector",
        "empty_hooks",
        "generation",
        "hook_times",
        "index",
        "isolated",
        "keeps_memory",
        "name",
        "standing_by",
        "stopped",
        "tally",
        "wants_preempted_ids",
    )

    def __init__(
        self, index: int, name: str, connector: Any, build: Callable[[], Any], watchdog: Watchdog | None = None
    ) -> None:
        """``build`` makes another instance like ``connector``."""
        self.index, self.name, self._build = index, name, build
        self._watchdog = watchdog or Watchdog(0.0)
        self.tally = Tally()
        self.hook_times = HookTimes()
        self.generation = 0
        self.isolated = False
        """Whether the present instance has failed, here or elsewhere."""
        self.standing_by = False
        """Whether the present instance waits for the other processes' instances."""
        self.stopped = False
        """Whether the present instance can touch nothing any more."""
        self.keeps_memory = False
        """Whether the KV cache lives in memory of the present instance, so that it can never be replaced."""
        self._logged: set[str] = set()
        self._adopt(connector)

    def _adopt(self, connector: Any) -> None:
        self.connector = connector
        self.empty_hooks = empty_hooks(connector)
        self.wants_preempted_ids = _wants_preempted_ids(connector)

    @property
    def in_service(self) -> bool:
        return not self.isolated and not self.standing_by

    @property
    def can_be_stopped(self) -> bool:
        """Whether ``shutdown`` ends its transfers: the interface's own does nothing."""
        own_shutdown = getattr(type(self.connector), "shutdown", None) is not KVConnectorBase_V1.shutdown
        return own_shutdown and not self.keeps_memory

    def call(
        self,
        hook: str,
        default: Result,
        *args: Any,
        parse: Callable[[Any], Result] | None = None,
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> Result:
        """The child's answer to ``hook(*args, **options)``, or ``default`` when it is out of service or raises.

        ``parse`` checks and converts the answer inside the fence: what it raises counts as the hook's exception. Hooks
        that are empty in the child's class are not called: ``default`` must be what an empty one answers.
        """
        if self.isolated or self.standing_by or hook in self.empty_hooks:
            return default
        return self._fenced(hook, default, args, parse, options)

    def ask(self, hook: str, default: Result, *args: Any, parse: Callable[[Any], Result] | None = None) -> Result:
        """As ``call``, also of a child out of service."""
        return self._fenced(hook, default, args, parse, _NO_OPTIONS)

    def read(self, hook: str, default: Result, parse: Callable[[Any], Result]) -> Result:
        """As ``call`` for a property."""
        if not self.in_service:
            return default
        self._watchdog.began(self.name, hook)
        try:
            return parse(getattr(self.connector, hook))
        except SHUTDOWN:
            raise
        except BaseException as error:
            self.failed(hook, error)
            return default
        finally:
            self._ended(hook)

    def _fenced(
        self,
        hook: str,
        default: Result,
        args: tuple[Any, ...],
        parse: Callable[[Any], Result] | None,
        options: Mapping[str, Any],
    ) -> Result:
        self._watchdog.began(self.name, hook)
        try:
            answer = getattr(self.connector, hook)(*args, **options)
            return parse(answer) if parse is not None else answer
        except SHUTDOWN:
            raise
        except BaseException as error:
            self.failed(hook, error)
            return default
        finally:
            seconds = self._ended(hook)
            if self._watchdog.is_hang(seconds):
                self.tally.count("hangs")
                self.isolate(f"it took {seconds:.1f} s in {hook} (hang_after_s)")

    def _ended(self, hook: str) -> float:
        """Called when a hook of the present instance has returned. Counts and returns the seconds it took."""
        seconds = self._watchdog.ended()
        self.hook_times.add(hook, seconds)
        if hook == LOOKUP:
            self.tally.observe("lookup_seconds", seconds)
        return seconds

    def start(self, hook: str, *args: Any) -> Any:
        """As ``call`` for a hook that runs before serving; see ``at_start``."""
        return at_start(self.name, hook, lambda: getattr(self.connector, hook)(*args))

    def failed(self, hook: str, error: BaseException) -> None:
        """Counts and logs one exception, and isolates the child."""
        self.tally.count("errors", label=hook)
        self.log_once(hook, "failed in %s; it is logged once and counted from here on.", hook, exc_info=error)
        self.isolate(f"it failed in {hook}")

    def isolate(self, reason: str) -> None:
        """Takes the present instance out of service in this process. Its asynchronous transfers may still run."""
        if not self.isolated:
            self.isolated = True
            logger.warning("Connector %r is out of service in this process: %s.", self.name, reason)

    def stop(self) -> bool:
        """Shuts the present instance down. True if that worked, now or before; else it may be tried again."""
        if self.stopped:
            return True
        self._watchdog.began(self.name, "shutdown")
        try:
            self.connector.shutdown()
            self.stopped = True
        except SHUTDOWN:
            raise
        except BaseException as error:
            self.tally.count("errors", label="shutdown")
            self.log_once("shutdown", "could not be shut down. What it still holds stays held.", exc_info=error)
        finally:
            self._ended("shutdown")
        return self.stopped

    def renew(self, generation: int, *start_hooks: tuple[str, Any]) -> bool:
        """Replaces the stopped instance by a new one, which stands by; False when it cannot be built or started.

        ``start_hooks``: what else vLLM gives an instance before serving, with its one argument.
        """
        self.generation = generation
        hook = "__init__"
        try:
            if self.keeps_memory:
                raise RuntimeError("the KV cache lives in its memory, so that it cannot be replaced")
            self._adopt(self._watched(hook, self._build))
            self.isolated = self.stopped = False
            for hook, argument in start_hooks:
                self._watched(hook, partial(getattr(self.connector, hook), argument))
        except SHUTDOWN:
            raise
        except BaseException as error:
            self.failed(hook, error)
            return False
        self.standing_by = True
        return True

    def _watched(self, hook: str, action: Callable[[], Result]) -> Result:
        self._watchdog.began(self.name, hook)
        try:
            return action()
        finally:
            self._ended(hook)

    def log_once(self, topic: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        if topic not in self._logged:
            self._logged.add(topic)
            logger.error("Connector %r " + message, self.name, *args, exc_info=exc_info)


def at_start(name: str, hook: str, action: Callable[[], Result]) -> Result:
    """Runs a child's hook before serving: an exception becomes a refusal that names child and hook."""
    try:
        return action()
    except SHUTDOWN:
        raise
    except BaseException as error:
        raise RuntimeError(f"connector {name!r} of the MultiConnector failed in {hook}: {error}") from error


def _wants_preempted_ids(connector: Any) -> bool:
    """Whether ``handle_preemptions`` is the older one that takes ``set[str]`` instead of the metadata."""
    try:
        (parameter, *_) = inspect.signature(connector.handle_preemptions).parameters.values()
        return "req" in parameter.name or str(parameter.annotation).startswith("set[")
    except SHUTDOWN:
        raise
    except BaseException:  # no signature, or foreign code behind the name: then it is called as the interface says
        return False
