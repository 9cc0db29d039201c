# SPDX-License-Identifier: Apache-2.0
"""What a MultiConnector's halves remember of requests. Once all are finished and reported it must be nothing."""

from collections.abc import Iterable
from typing import Any

from vllm_overlay.multi_connector import MultiConnector

_OF_LIVING_REQUESTS = {"_living", "_latest_loads"}
_OF_NO_REQUEST = {"_start_hooks", "_handshakes", "_invalid_blocks", "quiet"}


def _entries(parts: Iterable[object], left_out: set[str]) -> int:
    tables: list[Any] = [
        table
        for part in parts
        for name, table in vars(part).items()
        if isinstance(table, dict | set) and name not in left_out | _OF_NO_REQUEST
    ]
    return sum(map(len, tables))


def of_scheduler(connector: MultiConnector) -> int:
    half = connector._scheduler
    news = half._next
    return _entries((half, half.lookups, half._outstanding, *half._filters), set()) + sum(
        map(len, (news.loads, news.saves, news.releases, *news.unknown_requests.values()))
    )


def of_worker(connector: MultiConnector) -> int:
    """But for requests that live as far as this rank was told."""
    half = connector._worker
    return _entries((half, half._completions), _OF_LIVING_REQUESTS) + sum(map(len, half._unknown_requests))


def living(connector: MultiConnector) -> int:
    """What of requests that are not finished, as far as this rank was told."""
    return sum(len(vars(connector._worker._completions)[table]) for table in _OF_LIVING_REQUESTS)


def blocks_in_use(scheduler: Any) -> int:
    """Device blocks of vLLM's scheduler that are not free."""
    pool = scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # type: ignore[no-any-return]
