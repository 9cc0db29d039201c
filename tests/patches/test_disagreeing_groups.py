# SPDX-License-Identifier: Apache-2.0
"""Groups whose local hits differ, and a connector with any answer: vLLM's own scheduler, over three kinds of groups."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.patches.lab import LabConnector, config

BLOCK, UNIT, NUM_BLOCKS = 64, 16, 400
HASHER = get_request_block_hasher(UNIT, sha256)


def make_scheduler(model: Path, *, with_window: bool) -> Scheduler:
    """Full attention, a state and perhaps a window; no model runs."""
    attention: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    state = MambaSpec(block_size=BLOCK, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align")
    specs = [FullAttentionSpec(**attention), state]
    if with_window:
        specs.append(SlidingWindowSpec(**attention, sliding_window=2 * BLOCK))
    vllm_config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=8192, max_model_len=8192, is_encoder_decoder=False, watermark=0.0
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode="align"),
        kv_transfer_config=KVTransferConfig(**config()),
    )
    vllm_config.cache_config.block_size = BLOCK
    vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
    register_all_kvcache_specs(vllm_config)
    init_none_hash(sha256)
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK,
        hash_block_size=UNIT,
        log_stats=True,
    )


def make_request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=HASHER,
    )


def fill(scheduler: Scheduler, name: str, tokens: list[int]) -> None:
    """Caches a prompt in the device cache, block by block, so that there is a state at each boundary."""
    manager = scheduler.kv_cache_manager
    request = make_request(name, tokens)
    while request.num_computed_tokens < len(tokens):
        done = request.num_computed_tokens
        step = min(BLOCK - done % BLOCK, len(tokens) - done)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
        for one in manager.coordinator.single_type_managers:
            one.new_step_starts()
    manager.free(request)


@pytest.fixture
def lab_connector() -> Iterator[type[LabConnector]]:
    yield LabConnector
    LabConnector.divergent, LabConnector.answer = False, None


@pytest.mark.parametrize("with_window", [False, True])
def test_a_hit_ends_at_what_all_groups_have_whatever_they_lost_and_the_connector_answers(
    tiny_model: Path, lab_connector: type[LabConnector], with_window: bool
) -> None:
    scheduler = make_scheduler(tiny_model, with_window=with_window)
    manager = scheduler.kv_cache_manager
    disagreed = 0
    for seed in range(150):
        source = random.Random(seed)
        assert manager.reset_prefix_cache()
        tokens = [source.randrange(256) for _ in range(source.randrange(3 * BLOCK, 8 * BLOCK))]
        fill(scheduler, f"fill-{seed}", tokens)
        lost = source.choice([0, 0.2, 0.5])
        manager.evict_blocks(
            {block.block_id for block in manager.block_pool.blocks if block.block_hash and source.random() < lost}
        )
        answer, asynchronous = source.choice([0, 0, -1, UNIT, BLOCK, 3 * BLOCK + UNIT, 9999]), source.random() < 0.5
        lab_connector.divergent = source.random() < 0.7
        lab_connector.answer = lambda *_, found=(answer, asynchronous): found  # type: ignore[assignment]
        request = make_request(f"ask-{seed}", tokens + [0] * source.randrange(1, 200))
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
