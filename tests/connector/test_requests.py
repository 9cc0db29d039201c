# SPDX-License-Identifier: Apache-2.0
"""How far a request was considered for storing, after failures and evictions together."""

from tests.connector.harness import GEOMETRY
from tests.naive_twin import block_hashes
from vllm_overlay.connector.requests import StoreCursor
from vllm_overlay.planner.planner import HybridOffloadPlanner

KEYS = block_hashes(b"p" * 400)
CHUNKS = [HybridOffloadPlanner(GEOMETRY).chunk(KEYS, GEOMETRY.full[0], index) for index in range(4)]


def test_a_retry_that_comes_after_unwanted_chunks_ends_when_it_is_stored() -> None:
    cursor = StoreCursor()
    cursor.submitted(CHUNKS[2])
    cursor.failed(CHUNKS[2], step=1)
    cursor.go_back(CHUNKS[1])  # evicted meanwhile, and now not wanted by the tier
    cursor.submitted(CHUNKS[2])
    assert not cursor.may_store(step=9)
    cursor.stored(CHUNKS[2])
    assert cursor.may_store(step=9)
