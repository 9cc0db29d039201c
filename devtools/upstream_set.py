# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's own tests ``upstream_tests.py`` runs, what it leaves out and why, and what they need beside vLLM.

Chosen from all of vLLM's tests/: what the series touches, and every test of a connector, of offloading or of P/D that
runs without a GPU. A directory stands for all its files. To choose anew for another vLLM: search its tests/ for
``kv_connector`` and ``kv_transfer``, run what was found, and leave out what passes nothing.
"""

UNIT = "tests/v1/kv_connector/unit"
TESTS = (
    "tests/v1/core",
    # Connectors and offloading: NIXL, MoRIIO, Mooncake, HiSparse, LMCache, SimpleCPUOffload, Offloading and others.
    "tests/v1/kv_connector",
    "tests/v1/kv_offload",
    "tests/v1/simple_kv_offload",
    "tests/v1/ec_connector",
    # What else uses a connector or its settings.
    "tests/config/test_aux_output_config.py",
    "tests/distributed/test_kvlayout.py",
    "tests/model_executor/test_routed_experts_capture.py",
    "tests/test_config.py",
    "tests/v1/attention/test_backend_per_kind.py",
    "tests/v1/engine/test_admission_control.py",
    "tests/v1/engine/test_engine_core_shutdown_signal.py",
    "tests/v1/engine/test_kv_cache_group_metadata.py",
    "tests/v1/engine/test_kv_transfer_rejection.py",
    "tests/v1/executor/test_multiproc_executor.py",
    "tests/v1/test_kv_cache_spec_registry.py",
    # What else the series touches: the CPU platform, adapters, statistics, the model runners, states.
    "tests/lora/test_lora_checkpoints.py",
    "tests/lora/test_lora_manager.py",
    "tests/platforms/test_cpu.py",
    "tests/v1/metrics/test_histogram_buckets.py",
    "tests/v1/metrics/test_perf_metrics.py",
    "tests/v1/metrics/test_stats.py",
    *(
        f"tests/v1/worker/test_{name}.py"
        for name in (
            *("attn_utils", "gpu_input_batch", "gpu_kv_connector", "gpu_model_runner", "gpu_model_runner_v2"),
            *("gpu_model_runner_v2_eplb", "gpu_worker", "kv_cache_allocation_scope", "mamba_hybrid_model_state"),
            *("mamba_utils", "mixed_warmup_gate", "utils"),
        )
    ),
)

_HUB = "serves a model from the Hub"
_GPU = "needs a GPU: every test is skipped without one"
_ROCM = "needs ROCm: every test is skipped without it"
_SERVERS = "wants servers of two GPUs that are already running"
LEFT_OUT = {
    "tests/v1/core/test_reset_prefix_cache_e2e.py": _HUB,
    "tests/v1/core/test_priority_scheduler_random.py": "reads a multimodal model from the Hub",
    "tests/v1/core/test_scheduler_e2e.py": _HUB,
    "tests/v1/core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py": _HUB,
    "tests/v1/ec_connector/integration": _SERVERS,
    "tests/v1/ec_connector/unit/test_ec_cpu_connector.py": _GPU,
    "tests/v1/kv_connector/extract_hidden_states_integration": _HUB,
    "tests/v1/kv_connector/mooncake_integration": "wants running servers, and Mooncake's engine for its import",
    "tests/v1/kv_connector/nixl_integration": _SERVERS,
    f"{UNIT}/test_example_connector.py": _GPU,
    f"{UNIT}/test_hf3fs_client.py": "needs hf3fs_fuse, which is not on PyPI",
    **{
        f"{UNIT}/test_moriio_{name}.py": _ROCM
        for name in ("connector", "kv_layout", "toy_proxy_server", "transfer_completion")
    },
    f"{UNIT}/test_nixl_rocm_gpu_mem_diag.py": _ROCM,
    f"{UNIT}/test_offloading_connector.py": "needs a GPU, or a model from the Hub",
    "tests/v1/kv_offload/cpu/test_swap_blocks_batch.py": _GPU,
    "tests/v1/kv_offload/cpu/test_swap_blocks_triton.py": _GPU,
    "tests/v1/kv_offload/tiering/test_kvcr_tier.py": "needs kvcr, which needs NIXL itself and so CUDA",
    "tests/v1/simple_kv_offload/test_integration.py": _GPU,
    "tests/v1/simple_kv_offload/test_worker.py": _GPU,
}
"""Files and directories in ``TESTS`` of which no test runs here, and why."""

_SHARED = (
    "patch 0006: of two requests that share bad blocks it lets one go on with blocks that the other still computes; "
    "the poison fuzz shows wrong tokens of that, so both start anew"
)
_WHOLE = "patch 0002: its connector loads the whole prompt of a model with states, which applies the last token twice"
_EARLIER = "patch 0032: the connector hears of preemptions before pre_forward, which no longer tells it"
KNOWN = {
    "tests.v1.core.test_scheduler::test_delayed_kv_connector_free_keeps_scheduler_active": "patch 0003: it puts a "
    "finished request into the scheduler by hand, past the place that notes what the request waits for",
    f"{UNIT.replace('/', '.')}.test_kv_load_failure_recovery"
    "::test_block_level_load_failure_fails_closed_with_multiple_groups": "patch 0006: it wants the RuntimeError",
    **{
        f"{UNIT.replace('/', '.')}.test_kv_load_failure_recovery"
        f"::test_sync_load_failure_with_shared_blocks[100-99-50-invalid_block_idxs{i}]": _SHARED
        for i in range(3)
    },
    f"{UNIT.replace('/', '.')}.test_multi_connector"
    "::test_multi_connector_overrides_all_base_methods": "patch 0012: its method completes_local_attention is of our "
    "MultiConnector; vLLM's answers as the base class, False, as before",
    f"{UNIT.replace('/', '.')}.test_multi_connector.TestMultiConnectorStats"
    "::test_build_kv_connector_stats_raises_error_for_unknown_connector": "patch 0011: it wants the ValueError",
    f"{UNIT.replace('/', '.')}.test_remote_prefill_lifecycle"
    "::test_async_load_does_not_double_reserve_mamba_spec_blocks[none-128-18]": _WHOLE,
    f"{UNIT.replace('/', '.')}.test_remote_prefill_lifecycle"
    "::test_async_load_does_not_double_reserve_mamba_spec_blocks[align-16-18]": _WHOLE,
    **{
        f"tests.v1.worker.test_gpu_kv_connector::test_{name}": _EARLIER
        for name in ("load_start_phase[False]", "load_start_phase[True]", "no_forward_starts_deferred_load_once")
    },
}
"""Tests that the series makes fail, and why that is meant."""
REQUIREMENTS = (
    "msgpack==1.2.4",  # MoRIIO imports it
    "pytest-asyncio==1.5.0",
    "pytest-forked==1.7.5",
    "ray==2.60.0",  # test_nixl_connector.py and test_bidirectional_kv_transfer.py import it
    "tblib==3.2.2",
)
"""Without their dependencies, in a directory of their own. NIXL, Mooncake and MoRI are faked by the tests."""
BUILD_REQUIREMENTS = ("setuptools<81", "setuptools-scm", "setuptools-rust", "wheel", "packaging")
MODELS = {
    "facebook/opt-125m": ("OPTConfig", {}),
    "facebook/opt-350m": ("OPTConfig", {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24}),
    "Qwen/Qwen3-0.6B": ("Qwen3Config", {}),
    "Qwen/Qwen1.5-7B": ("Qwen2Config", {"num_key_value_heads": 32}),
    "llava-hf/llava-1.5-7b-hf": ("LlavaConfig", {}),
}
"""Configurations that tests read from the Hub; these have the architecture's defaults and no weights."""
