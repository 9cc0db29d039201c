# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM how it will cut a model's KV cache, without weights, devices or network: ``vllm-overlay plan`` runs this.

``python -m vllm_overlay.dry_start QUESTION ANSWER``: reads a ``planning.question.Question`` as JSON from one file and
writes an ``Answer`` to another. It is a process of its own, because vLLM changes what a process has only once:
environment variables, process groups, the default dtype. The model is built on the meta device.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ValidationError

from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import GeometryError, Group, check_groups
from vllm_overlay.planning.question import Answer, EngineLayout, Question

_STATIC_GIB = "1"
"""Of KV cache on a CPU; nothing is allocated, but vLLM would look for free memory."""


def main(question_path: str, answer_path: str) -> None:
    """Writes the answer, which is a refusal where the connector or vLLM refuses."""
    question = msgspec.json.decode(Path(question_path).read_bytes(), type=Question)
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = _STATIC_GIB
    try:
        answer = Answer(layout=_layout(question))
    except (ConfigError, GeometryError) as error:
        answer = Answer(refusal=str(error))
    except (ValueError, AssertionError, NotImplementedError, OSError, KeyError) as error:
        answer = Answer(refusal=f"vLLM cannot start {question.model}: {_sentence(error)}")
    Path(answer_path).write_bytes(msgspec.json.encode(answer))


def _sentence(error: Exception) -> str:
    """One that says which setting it is about, where pydantic knows."""
    if not isinstance(error, ValidationError):
        return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])


def _layout(question: Question) -> EngineLayout:
    from vllm import __version__
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    arguments: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": True}
    engine_arguments = EngineArgs(model=question.model, **arguments, **question.engine_arguments)
    vllm_config = engine_arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    with set_current_vllm_config(vllm_config):
        _build_on_meta(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)
        vllm_config.validate_block_size()
        groups = _groups(vllm_config)
    states = any(not group.is_attention for group in groups)
    return EngineLayout(
        vllm=__version__,
        platform=current_platform.device_type,
        groups=tuple(groups),
        block_size=max(group.block_size for group in groups),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        state_dtype=_state_dtype(vllm_config) if states else "",
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _build_on_meta(vllm_config: Any) -> None:
    """Registers the layers of one rank. Nobody computes, so it is one process that says it is one of several."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as directory:
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/store", 0, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        parallel_state.get_tp_group().world_size = vllm_config.parallel_config.tensor_parallel_size
        with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config)


def _specs(vllm_config: Any) -> dict[str, Any]:
    """vLLM's KV cache spec of each layer that has a cache of its own."""
    from vllm.config.vllm import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    specs = {}
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        if (spec := layer.get_kv_cache_spec(vllm_config)) is not None:
            is_attention = isinstance(spec, AttentionSpec)
            specs[name] = customize_attention_spec(layer.get_attn_backend(), spec) if is_attention else spec
    return specs


def _groups(vllm_config: Any) -> list[Group]:
    """The planner's groups, as a connector finds them. Raises ConfigError for what it refuses."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_overlay.connector.compatibility import check_supported, states_end_with_requests
    from vllm_overlay.connector.kv_cache_groups import planner_groups
    from vllm_overlay.tiers.factory import tier_spec

    vllm_config.cache_config.kv_cache_layout = "LBHNC"  # As on a CPU; it changes no size.
    groups = get_kv_cache_groups(vllm_config, _specs(vllm_config))
    kv_cache_config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    check_supported(vllm_config, kv_cache_config, tier_spec({"tier": "cpu"}))
    if states_end_with_requests(kv_cache_config):
        raise ConfigError("vLLM keeps this model's states only while a request runs, so nothing could be restored")
    planned = planner_groups(kv_cache_config, dict(enumerate(map(_pages, groups))))
    if len(groups) > 1 and (unit := vllm_config.cache_config.prefix_match_unit):
        check_groups(planned, unit)
        resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return planned


def _pages(group: Any) -> Any:
    """Tensors of the sizes that a worker will register, of one block, without memory."""
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec, iter_layer_specs

    from vllm_overlay.transfer.group_tensors import GroupTensors
    from vllm_overlay.transfer.page_map import CellMap

    specs = list(iter_layer_specs(group.kv_cache_spec)) * (
        len(group.layer_names) if not hasattr(group.kv_cache_spec, "kv_cache_specs") else 1
    )
    is_cut = True
    layers = []
    for spec in specs:
        if isinstance(spec, AttentionSpec):
            shape = (1, 1, spec.block_size, spec.unpadded_page_size_bytes // spec.block_size)
            is_cut &= spec.dtype.is_floating_point and not isinstance(spec, MLAAttentionSpec)
        else:
            shape, is_cut = (1, 1, 1, spec.state_content_size_bytes), False
        layers.append(torch.empty(shape, dtype=torch.int8, device="meta"))
    return GroupTensors(tuple(layers), CellMap() if is_cut else None)


def _state_dtype(vllm_config: Any) -> str:
    """The dtype of the recurrent state itself, the last that a layer has."""
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = [spec for spec in _specs(vllm_config).values() if isinstance(spec, MambaSpec)]
    return str(specs[0].dtypes[-1]).removeprefix("torch.")


if __name__ == "__main__":
    main(*sys.argv[1:])
