# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler over full attention, a state and perhaps a window, in blocks of 64 tokens; no model runs."""

from pathlib import Path
from typing import Any

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
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, UNIT, NUM_BLOCKS = 64, 16, 400


def make_scheduler(
    model: Path | str,
    kv_transfer_config: dict[str, Any],
    *,
    with_window: bool = False,
    unit: int = UNIT,
    ranks_of_a_block: int = 1,
) -> Scheduler:
    """A scheduler with the connector of ``kv_transfer_config``.

    ``unit`` is the match unit. ``ranks_of_a_block`` is the size of decode context parallelism.
    """
    attention: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    whole = BLOCK * ranks_of_a_block  # what a block holds on all ranks; a state is not shared out
    state = MambaSpec(block_size=whole, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align")
    specs = [FullAttentionSpec(**attention), state]
    if with_window:
        specs.append(SlidingWindowSpec(**attention, sliding_window=2 * BLOCK))
    vllm_config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=8192, max_model_len=8192, is_encoder_decoder=False, watermark=0.0
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode="align"),
        kv_transfer_config=KVTransferConfig(**kv_transfer_config),
    )
    vllm_config.cache_config.block_size = whole
    vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
    vllm_config.parallel_config.decode_context_parallel_size = ranks_of_a_block
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
        block_size=whole,
        hash_block_size=unit,
        log_stats=True,
    )


def make_request(name: str, tokens: list[int], *, unit: int = UNIT, max_tokens: int = 4, **extra_args: Any) -> Request:
    """A request; ``extra_args`` are those of its sampling parameters: ``kv_transfer_params``, say."""
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra_args or None),
        pooling_params=None,
        block_hasher=get_request_block_hasher(unit, sha256),
    )


def fill(scheduler: Scheduler, name: str, tokens: list[int], *, unit: int = UNIT) -> None:
    """Caches a prompt in the device cache, block by block, so that there is a state at each boundary."""
    manager, block = scheduler.kv_cache_manager, scheduler.block_size
    request = make_request(name, tokens, unit=unit)
    while request.num_computed_tokens < len(tokens):
        done = request.num_computed_tokens
        step = min(block - done % block, len(tokens) - done)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
        for one in manager.coordinator.single_type_managers:
            one.new_step_starts()
    manager.free(request)
