# SPDX-License-Identifier: Apache-2.0
"""One child and the fence around it. What the child raises or garbles is logged, counted and answered for.

A child that raised, or answered what cannot be an answer, has done an unknown part of its work, so it is *isolated*: no
hook of it is called any more, here and (lifecycle.py) in all processes. It comes back as a new instance. Blocks that
the old one may still touch are given back only once it cannot touch them: see ``WorkerSide``.

The fence holds every exception, also those of native code that are no ``Exception``; common/fence.py says which pass.
"""

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.hooks import LOOKUP, Watchdog, empty_hooks, logger
from vllm_overlay.tally import Tally

Result = TypeVar("Result")
_FAILED = object()


class Child:
    """A child connector under its configured name. One per child and process; its instances come and go."""

    def __init__(
        self, index: int, name: str, connector: Any, build: Callable[[], Any], watchdog: Watchdog | None = None
    ) -> None:
        """``build`` makes another instance like ``connector``."""
        self.index, self.name, self._build = index, name, build
        self._watchdog = watchdog or Watchdog(0.0)
        self.tally = Tally()
        self.hook_seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds in each hook, until they join a report. An idle engine keeps what has not."""
        self.generation = 0
        self.isolated = False
        """Whether the present instance has failed, here or elsewhere."""
        self.standing_by = False
        """Whether the present instance waits for the other processes' instances."""
        self.stopped = False
        """Whether the present instance can touch nothing any more."""
        self.keeps_memory = False
        """Whether the KV cache lives in memory of the present instance, so that it can never be replaced."""
        self._start_hooks: dict[str, tuple[Any, ...]] = {}
        """What vLLM gives an instance before serving."""
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
        always: bool = False,
        **options: Any,
    ) -> Result:
        """The child's answer to ``hook(*args, **options)``, or ``default`` when it raises or, unless
        ``always``, is out of service.

        ``parse`` checks and converts the answer inside the fence: what it raises counts as the hook's exception. Hooks
        that are empty in the child's class are not called: ``default`` must be what an empty one answers. A hook may be
        a property; ``__init__`` makes a new instance.
        """
        if hook in self.empty_hooks or (not always and (self.isolated or self.standing_by)):
            return default
        watchdog = self._watchdog
        if watchdog.needs_thread:
            watchdog.start()
        started = watchdog.clock()
        watchdog.call = self.name, hook, started, get_ident()
        try:
            found: Any = self._rebuild if hook == "__init__" else getattr(self.connector, hook)
            answer = found(*args, **options) if callable(found) else found
            return parse(answer) if parse is not None else answer
        except SHUTDOWN:
            raise
        except BaseException as error:
            self.tally.count("errors", label=hook)
            self.log_once(hook, "failed in %s; it is logged once and counted from here on.", hook, exc_info=error)
            self.isolate(f"it failed in {hook}")
            return default
        finally:
            watchdog.call = None
            seconds = watchdog.clock() - started
            self.hook_seconds[hook] += seconds
            if hook == LOOKUP:
                self.tally.observe("lookup_seconds", seconds)
            if seconds > watchdog.limit_s and not self.isolated:
                self.tally.count("hangs")
                self.isolate(f"it took {seconds:.1f} s in {hook} (hang_after_s)")

    def take_tally(self, *, with_hook_seconds: bool) -> Tally:
        """What was counted since the last call. Seconds in hooks change with every step, and others need not."""
        if with_hook_seconds:
            for hook, seconds in self.hook_seconds.items():
                self.tally.count("hook_seconds", seconds, hook)
            self.hook_seconds.clear()
        return self.tally.take()

    def start(self, hook: str, *args: Any, again: bool = False) -> Any:
        """As ``call`` for a hook that runs before serving; see ``at_start``. ``again``: also of instances to come."""
        if again:
            self._start_hooks[hook] = args
        return at_start(self.name, hook, lambda: self._answer(hook, *args))

    def _answer(self, hook: str, *args: Any) -> Any:
        found = getattr(self.connector, hook)
        return found(*args) if callable(found) else found

    def isolate(self, reason: str) -> None:
        """Takes the present instance out of service in this process. Its asynchronous transfers may still run."""
        if not self.isolated:
            self.isolated = True
            logger.warning("Connector %r is out of service in this process: %s.", self.name, reason)

    def stop(self) -> bool:
        """Shuts the present instance down. True if that worked, now or before; else it may be tried again."""
        if not self.stopped:
            self.stopped = self.call("shutdown", _FAILED, always=True) is not _FAILED
        return self.stopped

    def renew(self, generation: int) -> bool:
        """Replaces the stopped instance by a new one, which stands by; False when it cannot be built or started.

        Until all is done the child counts as isolated, so that a new instance may take its time.
        """
        self.generation, self.isolated = generation, True
        for hook, args in {"__init__": (), **self._start_hooks}.items():
            if self.call(hook, _FAILED, *args, always=True) is _FAILED:
                return False
        self.isolated, self.standing_by = False, True
        return True

    def _rebuild(self) -> None:
        if self.keeps_memory:
            raise RuntimeError("the KV cache lives in its memory, so that it cannot be replaced")
        self._adopt(self._build())
        self.stopped = False

    def log_once(self, topic: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        if topic not in self._logged:
            self._logged.add(topic)
            logger.error("Connector %r " + message, self.name, *args, exc_info=exc_info)


@contextlib.contextmanager
def refused(what: str, kind: type[Exception] = ConfigError) -> Iterator[None]:
    """The fence before serving: what is raised inside becomes a refusal that begins with ``what``."""
    try:
        yield
    except SHUTDOWN:
        raise
    except BaseException as error:
        raise kind(f"{what}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """The text of an error on one line. pydantic's errors have several."""
    details = getattr(error, "errors", None)
    if callable(details):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in details())
    return " ".join(str(error).split()) or type(error).__name__


def at_start(name: str, hook: str, action: Callable[[], Result]) -> Result:
    """Runs a child's hook before serving."""
    with refused(f"connector {name!r} of the MultiConnector failed in {hook}", RuntimeError):
        return action()


@contextlib.contextmanager
def harmless(message: str) -> Iterator[None]:
    """The fence for what a child hands over outside its hooks: its stats, metrics and events.

    What raises inside is left out, and logged once in a process. A shutdown passes.
    """
    try:
        yield
    except SHUTDOWN:
        raise
    except BaseException:
        _log_exception_once(message)


@functools.cache
def _log_exception_once(message: str) -> None:
    logger.exception(message)


def _wants_preempted_ids(connector: Any) -> bool:
    """Whether ``handle_preemptions`` is the older one that takes ``set[str]`` instead of the metadata."""
    method: Any = inspect.getattr_static(connector, "handle_preemptions", None)
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # no signature: then it is called as the interface says
        return False
    return any("req" in parameter.name or str(parameter.annotation).startswith("set[") for parameter in parameters)
