# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler on a hybrid model's KV cache groups, without a model: what it plans, a millisecond a step.

Each process has one vLLM: for the one without the series ``PYTHONPATH`` names it.
"""

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
"""Only its length and its kind of runner matter: the KV cache groups are given by hand."""


@dataclass(frozen=True, slots=True)
class LabSettings:
    """Of one scheduler; lengths in tokens. ``match_unit`` None: the block. ``budget``: ``max_num_batched_tokens``."""

    block_size: int = 1056
    match_unit: int | None = None
    budget: int = 8192
    num_blocks: int = 4096
    num_state_groups: int = 1
    """0: a model of attention alone."""
    has_window: bool = False
    """One more group: attention in a window of two blocks."""
    keeps_checkpoints: bool = False
    """A prompt's last pass also keeps the state at its last match unit, as that of Mamba2 does on a GPU."""
    num_context_ranks: int = 1
    """The size of decode context parallelism: so many ranks share out the tokens of ``block_size``."""
    max_requests: int = 64
    max_context: int = 65536
    is_asynchronous: bool = False
    is_v2: bool = False
    """The V2 model runner does what is planned."""
    retention_interval: int | None = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    longest_prefill: int = 0
    """``long_prefill_token_threshold``; 0: the budget."""
    num_drafts: int = 0
    """``num_speculative_tokens`` of a drafter that keeps no keys; 0: no speculation."""
    kv_transfer_config: KVTransferConfig | None = None


@cache
def _model_config(max_context: int) -> ModelConfig:
    directory = Path(tempfile.mkdtemp(prefix="scheduler-lab-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(str(directory), skip_tokenizer_init=True, max_model_len=max_context, dtype="bfloat16")


def _kv_cache_config(settings: LabSettings) -> KVCacheConfig:
    of_a_rank = settings.block_size // settings.num_context_ranks
    attention: dict[str, Any] = {"block_size": of_a_rank, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs: list[KVCacheSpec] = [FullAttentionSpec(**attention)]
    states = MambaSpec(
        block_size=settings.block_size,
        shapes=((1,), (1,)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=specs[0].page_size_bytes,
        mamba_cache_mode="align",
        num_speculative_blocks=settings.num_drafts,
        num_prefill_checkpoint_blocks=int(settings.keeps_checkpoints),
        prefill_checkpoint_alignment=1 if settings.keeps_checkpoints else None,
    )
    specs += [states] * settings.num_state_groups
    if settings.has_window:
        specs.append(SlidingWindowSpec(**attention, sliding_window=2 * of_a_rank))
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=settings.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=settings.retention_interval,
    )


def make_scheduler(settings: LabSettings) -> Scheduler:
    """A scheduler as ``EngineCore`` builds it; its connector is the one of ``kv_transfer_config``."""
    cache_config = CacheConfig(block_size=settings.block_size, enable_prefix_caching=True)
    drafts = {"num_speculative_tokens": settings.num_drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    config = VllmConfig(
        model_config=_model_config(settings.max_context),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_requests,
            max_num_batched_tokens=settings.budget,
            max_model_len=settings.max_context,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=settings.is_asynchronous and not settings.num_drafts,
            policy=settings.policy,
            long_prefill_token_threshold=settings.longest_prefill,
            watermark=0.0,
        ),
        kv_transfer_config=settings.kv_transfer_config,
        speculative_config=SpeculativeConfig(method="ngram", **drafts) if settings.num_drafts else None,
    )
    config.parallel_config.decode_context_parallel_size = settings.num_context_ranks
    # The platform of this machine may have changed these, and vLLM refuses asynchronous n-gram.
    config.scheduler_config.async_scheduling = settings.is_asynchronous
    cache_config.block_size = settings.block_size
    cache_config.num_gpu_blocks = settings.num_blocks
    cache_config.mamba_cache_mode = "align" if settings.num_state_groups else "none"
    cache_config.prefix_cache_retention_interval = settings.retention_interval
    kind = AsyncScheduler if settings.is_asynchronous else Scheduler
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=_kv_cache_config(settings),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings.block_size,
        hash_block_size=settings.match_unit or settings.block_size,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = settings.is_v2
    return scheduler


def make_request(
    name: str, tokens: list[int], max_tokens: int, settings: LabSettings, priority: int = 0, **extra_args: Any
) -> Request:
    """A greedy request that ends after ``max_tokens``. ``extra_args``: ``kv_transfer_params``, say."""
    parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, extra_args=extra_args or None)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=parameters,
        pooling_params=None,
        block_hasher=_block_hasher(settings.match_unit or settings.block_size),
        priority=priority,
    )


@cache
def _block_hasher(unit: int) -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(unit, sha256)


def fill(scheduler: Scheduler, name: str, tokens: list[int], settings: LabSettings) -> None:
    """Caches a prompt in the device cache, block by block, so that there is a state at each boundary."""
    manager, block = scheduler.kv_cache_manager, settings.block_size
    request = make_request(name, tokens, 1, settings)
    while request.num_computed_tokens < len(tokens):
        done = request.num_computed_tokens
        step = min(block - done % block, len(tokens) - done)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
        for one in manager.coordinator.single_type_managers:
            one.new_step_starts()
    manager.free(request)


def sampled_tokens(scheduler: Scheduler, output: SchedulerOutput) -> dict[str, list[int]]:
    """What a model would say to this step, asked before the next one is planned: token 0 where the prompt has ended."""
    return {
        request_id: [] if scheduler.requests[request_id].is_prefill_chunk else [0]
        for request_id in output.num_scheduled_tokens
    }


def runner_output(
    sampled: dict[str, list[int]], kv_connector_output: KVConnectorOutput | None = None
) -> ModelRunnerOutput:
    names = list(sampled)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[sampled[name] for name in names],
        kv_connector_output=kv_connector_output,
    )
