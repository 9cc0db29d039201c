# SPDX-License-Identifier: Apache-2.0
"""Groups whose local hits differ, and a connector with any answer: vLLM's own scheduler, over three kinds of groups."""

import random
from collections.abc import Iterator

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from devtools.scheduler_lab import LabSettings, fill, make_request, make_scheduler
from tests.patches.lab import LabConnector, config

pytestmark = pytest.mark.patches

BLOCK, UNIT, NUM_BLOCKS = 64, 16, 400


@pytest.fixture
def lab_connector() -> Iterator[type[LabConnector]]:
    yield LabConnector
    LabConnector.completes, LabConnector.answer = False, None


@pytest.mark.parametrize("has_window", [False, True])
def test_a_hit_ends_at_what_all_groups_have_whatever_they_lost_and_the_connector_answers(
    lab_connector: type[LabConnector], has_window: bool
) -> None:
    settings = LabSettings(
        block_size=BLOCK,
        match_unit=UNIT,
        num_blocks=NUM_BLOCKS,
        has_window=has_window,
        kv_transfer_config=KVTransferConfig(**config()),
    )
    scheduler = make_scheduler(settings)
    manager = scheduler.kv_cache_manager
    disagreed = 0
    for seed in range(150):
        source = random.Random(seed)
        assert manager.reset_prefix_cache()
        tokens = [source.randrange(256) for _ in range(source.randrange(3 * BLOCK, 8 * BLOCK))]
        fill(scheduler, f"fill-{seed}", tokens, settings)
        lost = source.choice([0, 0.2, 0.5])
        manager.evict_blocks(
            {block.block_id for block in manager.block_pool.blocks if block.block_hash and source.random() < lost}
        )
        answer, asynchronous = source.choice([0, 0, -1, UNIT, BLOCK, 3 * BLOCK + UNIT, 9999]), source.random() < 0.5
        lab_connector.completes = source.random() < 0.7
        lab_connector.answer = lambda *_, found=(answer, asynchronous): found  # type: ignore[assignment]
        request = make_request(f"ask-{seed}", tokens + [0] * source.randrange(1, 200), 4, settings)
        _, agreed, _ = manager.get_computed_blocks(request)
        _, hits = manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, request.num_tokens - 1)
        disagreed += len(set(hits)) > 1

        scheduler.add_request(request)
        output = scheduler.schedule()

        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        known = request.num_computed_tokens if loading else output.scheduled_new_reqs[0].num_computed_tokens
        assert agreed <= known < request.num_tokens
        if answer in (0, -1, 9999):
            assert known == agreed and not loading
        attention, state, *_ = manager.get_block_ids(request.request_id)
        assert 0 not in attention[: -(-known // BLOCK)]
        assert known == 0 or state[(known - 1) // BLOCK] != 0

        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        if loading:
            scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={request.request_id}))
        assert request.request_id not in scheduler.requests
        assert manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert disagreed > 30
