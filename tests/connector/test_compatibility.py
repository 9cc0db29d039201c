# SPDX-License-Identifier: Apache-2.0
"""What is not supported yet is refused when a connector is built, in one sentence that says what to set."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from vllm_overlay.config import ConfigError
from vllm_overlay.connector.compatibility import SPECULATIVE_METHODS, check_supported, states_end_with_requests
from vllm_overlay.connector.connector import _hit_source
from vllm_overlay.tiers.base import TierSpec
from vllm_overlay.tiers.cpu import CpuTierSettings, CpuTierSpec
from vllm_overlay.tiers.factory import tier_spec

NO_GROUPS: Any = SimpleNamespace(kv_cache_groups=[])
CPU = tier_spec({"tier": "cpu"})
DISK = tier_spec({"tier": "disk", "root": "/tmp/root"})


def engine(**changes: object) -> Any:
    """A configuration that is supported, changed by ``section__field``."""
    config = SimpleNamespace(
        speculative_config=None,
        lora_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256"),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(use_mla=False, enable_sleep_mode=False),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True),
        max_concurrent_batches=1,
    )
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        setattr(getattr(config, section) if section else config, name, value)
    return config


def speculation(method: str = "mtp", num_tokens: int = 3, is_parallel: bool = False, **draft: int) -> Any:
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=num_tokens,
        parallel_drafting=is_parallel,
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**{"n_predict": None, **draft})),
    )


@pytest.mark.parametrize("method", SPECULATIVE_METHODS)
@pytest.mark.parametrize("spec", [CPU, DISK])
def test_these_ways_to_speculate_are_not_refused(spec: TierSpec[Any], method: str) -> None:
    check_supported(engine(speculative_config=speculation(method, n_predict=1)), NO_GROUPS, spec)
    check_supported(engine(speculative_config=speculation(method, 1, n_predict=2)), NO_GROUPS, spec)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device_config__device_type": "cuda"},
        {"lora_config": object()},
        {"kv_transfer_config__is_kv_consumer": False},
        {"max_concurrent_batches": 2},
    ],
    ids=lambda changes: ", ".join(changes) or "none",
)
@pytest.mark.parametrize("spec", [CPU, DISK])
def test_what_is_supported_is_not_refused(spec: TierSpec[Any], changes: dict[str, object]) -> None:
    check_supported(engine(**changes), NO_GROUPS, spec)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_config": speculation("medusa")}, "'medusa', which was never run: set method in --speculative"),
        ({"speculative_config": speculation("draft_model")}, "to one of ngram, suffix, custom_class, mtp"),
        ({"speculative_config": speculation("mtp", 2, n_predict=2)}, "set num_speculative_tokens in --speculative-co"),
        ({"speculative_config": speculation("mtp", 2, num_nextn_predict_layers=3)}, "num_speculative_tokens in"),
        ({"speculative_config": speculation("eagle3", is_parallel=True)}, "set parallel_drafting in --speculative-con"),
        ({"speculative_config": speculation(), "parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-"),
        ({"speculative_config": speculation(), "parallel_config__decode_context_parallel_size": 2}, "--decode-conte"),
        ({"parallel_config__pipeline_parallel_size": 2}, "set --pipeline-parallel-size 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, "set --decode-context-parallel-size 1"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 1"),
        ({"cache_config__enable_prefix_caching": False}, "set --enable-prefix-caching"),
        (
            {"cache_config__enable_prefix_caching": False, "model_config__use_mla": True},
            "vLLM's CPU platform switches it off for MLA where the processor has no AMX",
        ),
        ({"device_config__device_type": "tpu"}, "does not support 'tpu', where it was never run"),
        (
            {"device_config__device_type": "cuda", "model_config__enable_sleep_mode": True},
            "remove --enable-sleep-mode",
        ),
        ({"device_config__device_type": "xpu"}, "does not support 'xpu'"),
        (
            {"max_concurrent_batches": 2, "kv_transfer_config__is_kv_consumer": False},
            'set kv_role to "kv_both" or --no-async-scheduling',
        ),
    ],
)
@pytest.mark.parametrize("spec", [CPU, DISK])
def test_an_engine_that_is_not_supported_is_refused(
    changes: dict[str, object], words: str, spec: TierSpec[Any]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_supported(engine(**changes), NO_GROUPS, spec)
    assert words in str(refusal.value)


def test_rocm_is_refused_though_vllm_calls_its_devices_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_rocm", lambda: True)
    with pytest.raises(ConfigError, match="does not support ROCm"):
        check_supported(engine(device_config__device_type="cuda"), NO_GROUPS, CPU)


def test_vllm_itself_refuses_sleep_mode_on_a_cpu() -> None:
    assert not current_platform.is_sleep_mode_available()


def test_keys_seeded_at_random_are_refused_on_disk_and_fine_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = engine(cache_config__prefix_caching_hash_algo="xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_supported(seeded, NO_GROUPS, CPU)
    with pytest.raises(ConfigError, match="set PYTHONHASHSEED to a fixed number or use"):
        check_supported(seeded, NO_GROUPS, DISK)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_supported(seeded, NO_GROUPS, DISK)


def test_a_tier_whose_hits_vllm_cannot_name_is_refused() -> None:
    class Elsewhere(CpuTierSpec):
        hit_source = "tape"

    with pytest.raises(ConfigError, match="hit_source='tape' of Elsewhere must be one of device, host"):
        _hit_source(Elsewhere(CpuTierSettings(name="mine")))


def one_layer(spec: KVCacheSpec) -> Any:
    return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["model.layers.0"], spec)])


@pytest.mark.parametrize("mode", ["none", "align"])
def test_states_that_end_with_their_request_make_a_connector_idle_and_no_refusal(mode: str) -> None:
    groups = one_layer(
        MambaSpec(block_size=8192, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode),
    )
    assert states_end_with_requests(groups) == (mode == "none")
    check_supported(engine(cache_config__enable_prefix_caching=mode == "align"), groups, DISK)


def test_a_mode_of_states_that_is_not_known_is_refused() -> None:
    groups = one_layer(MambaSpec(block_size=64, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="all"))
    with pytest.raises(ConfigError, match=r"mamba_cache_mode='all' .* set --mamba-cache-mode align"):
        check_supported(engine(), groups, CPU)


def test_a_layer_without_a_reusable_prefix_is_refused_by_layer_and_spec() -> None:
    """The ring of keys that DeepSeek's sparse attention is still compressing."""
    groups = one_layer(CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"layers model\.layers\.0\.\.\. have a CircularBufferSpec"):
        check_supported(engine(), groups, CPU)
