# SPDX-License-Identifier: Apache-2.0
"""What a child's answers may be. Each function returns the answer or raises TypeError; used as ``parse`` in ``Child``.

An answer that passes here does no more harm in vLLM's scheduler, or on its way to another process, than a wrong number.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_overlay.named_child import QuietResults

Kind = TypeVar("Kind")


def optional(kind: type[Kind]) -> Callable[[Any], Kind | None]:
    """An instance of ``kind``, or None."""

    def parse(answer: Any) -> Kind | None:
        if answer is None or isinstance(answer, kind):
            return answer
        raise TypeError(f"{type(answer).__name__} is not a {kind.__name__}")

    return parse


def worker_metadata(answer: Any) -> Any:
    """Anything that can be added up: ``vllm.v1.outputs`` has ``object`` under the name of the class at run time."""
    if answer is None or callable(getattr(answer, "aggregate", None)):
        return answer
    raise TypeError(f"{type(answer).__name__} is no KVConnectorWorkerMetadata")


def truth(answer: Any) -> bool:
    """A bool, and not what only happens to be truthy: that would keep an engine waiting."""
    if isinstance(answer, bool):
        return answer
    raise TypeError(f"{answer!r} is neither True nor False")


def lookup(answer: Any) -> tuple[object, bool] | None:
    """The two parts of an answer to a lookup. Tokens that are some kind of integer are an int then."""
    tokens, asynchronous = answer
    with contextlib.suppress(TypeError):
        tokens = tokens if isinstance(tokens, bool) else int(operator.index(tokens))
    return tokens, bool(asynchronous)


def is_possible(tokens: object, ceiling: int) -> TypeGuard[int]:
    """Whether a child can mean so many tokens.

    A too large answer is not cut down to the ceiling: a child that keeps recurrent states has one at the boundary it
    named, not at the one it would be cut down to.
    """
    return type(tokens) is int and 0 <= tokens <= ceiling


def all_of(kind: type[Kind], answer: Iterable[Any]) -> list[Kind]:
    """All of them: an answer may be a generator, which has to run inside the fence."""
    found = list(answer)
    for one in found:
        if not isinstance(one, kind):
            raise TypeError(f"not all of {found!r} are a {kind.__name__}")
    return found


def integers(answer: Any) -> tuple[int, ...]:
    return tuple(all_of(int, answer))


def block_ids(answer: Any) -> set[int]:
    return set(integers(answer or ()))


def hit_sources(answer: Any) -> dict[CacheHitSource, int]:
    if isinstance(answer, dict):
        all_of(CacheHitSource, answer)
        integers(answer.values())
        return answer
    raise TypeError(f"{answer!r} are not tokens by source")


def request_ids(answer: Any) -> set[str]:
    return set(all_of(str, answer)) if answer else set()


def transfer_results(answer: Any) -> KVConnectorTransferResults | None:
    if isinstance(answer, QuietResults):
        return answer
    return KVConnectorTransferResults(
        finished_sending=request_ids(answer.finished_sending),
        finished_recving=request_ids(answer.finished_recving),
        failed_recving=request_ids(answer.failed_recving),
    )


def finished(answer: Any) -> tuple[bool, dict[str, Any] | None] | None:
    """Whether it holds the blocks, and what it says to the client."""
    holds, parameters = answer
    all_of(str, dict(parameters or {}))
    return truth(holds), None if parameters is None else dict(parameters)


def events(answer: "Iterable[KVCacheEvent] | None") -> list[KVCacheEvent]:
    return all_of(KVCacheEvent, answer or ())
