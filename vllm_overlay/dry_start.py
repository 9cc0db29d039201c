# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM how it will cut a model's KV cache, without weights and devices: ``vllm-overlay plan`` and ``serve`` do.

``python -m vllm_overlay.dry_start QUESTION ANSWER``: reads a ``planning.question.Question`` as JSON from one file and
writes an ``Answer`` to another. It is a process of its own, because vLLM changes what a process has only once:
environment variables, process groups, the default dtype. The model is built on the meta device.
"""

import os
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from pydantic import ValidationError

from vllm_overlay.config import GIB, ConfigError
from vllm_overlay.planner.geometry import GeometryError, Group, check_groups
from vllm_overlay.planning.question import Answer, EngineLayout, Flags, Question, Reply
from vllm_overlay.settings.check import did_you_mean

_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
_STATIC_GIB = "1"
"""Of KV cache on a CPU; nothing is allocated, but vLLM would look for free memory."""
_WITHOUT_WEIGHTS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "shutdown_timeout": 0,
    "gpu_memory_utilization": 0.5,
}
_ONE_ENGINE = {
    "data_parallel_size": 1,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_size_local": None,
    "data_parallel_hybrid_lb": False,
    "data_parallel_external_lb": False,
}
"""All engines are alike, and one that knew of the others would wait for them."""


def main(question_path: str, answer_path: str) -> None:
    question = msgspec.json.decode(Path(question_path).read_bytes(), type=Question)
    if not question.may_fetch:
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    Path(answer_path).write_bytes(msgspec.json.encode(answer(question)))


def answer(question: Question) -> Answer:
    """A refusal where the connector or vLLM refuses."""
    try:
        return Answer(reply=_reply(question))
    except (ConfigError, GeometryError) as error:
        return Answer(refusal=str(error))
    except (ValueError, TypeError, AssertionError, NotImplementedError, OSError, KeyError) as error:
        return Answer(refusal=f"vLLM cannot start: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    """One that says which setting it is about, where pydantic knows."""
    if not isinstance(error, ValidationError):
        return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])


def _reply(question: Question) -> Reply:
    from vllm.transformers_utils.utils import is_cloud_storage

    parsed = _parsed(question.arguments)
    flags = Flags(
        model=parsed.model,
        prefix_match_unit=parsed.prefix_match_unit,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        prefix_cache_retention_interval=parsed.prefix_cache_retention_interval,
        enable_prefix_caching=parsed.enable_prefix_caching,
        shutdown_timeout=parsed.shutdown_timeout,
        kv_cache_memory_bytes=_cache_bytes(parsed),
        gpu_memory_utilization=parsed.gpu_memory_utilization,
        tensor_parallel_size=parsed.tensor_parallel_size,
        num_engines=parsed.data_parallel_size_local or parsed.data_parallel_size,
    )
    if not (question.may_fetch and is_cloud_storage(parsed.model)):
        _require_configuration(parsed.hf_config_path or parsed.model, parsed.revision, question.may_fetch)
    return Reply(flags, _layout(parsed, question.kv_transfer_config))


def _cache_bytes(parsed: Any) -> int | None:
    """Of vLLM's own KV cache, where it was given: on a CPU the environment comes before the flag."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and (gib := os.environ.get(_CACHE_GIB)):
        return int(gib) * GIB
    given: int | None = parsed.kv_cache_memory_bytes
    return given


def _node_bytes() -> int:
    """``EngineLayout.node_bytes``."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    return int(get_memory_node_info(get_visible_memory_node()[0]).total_memory)


def _parsed(arguments: Sequence[str]) -> Any:
    """What ``python -m vllm.entrypoints.openai.api_server`` makes of them; None where a flag of ours was not given.

    Raises ConfigError, also for flags that this program would drop in silence.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            """vLLM's would end the process."""
            unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
            hint = did_you_mean(unknown[1], self._option_string_actions) if unknown else ""
            raise ConfigError(f"vLLM's server: {message}{hint}")

    parser = make_arg_parser(Parser())
    parser.set_defaults(model=None, shutdown_timeout=None, gpu_memory_utilization=None)
    parsed = parser.parse_args(list(arguments))
    if parsed.model is None:
        raise ConfigError("which model? Write it first, as in MODEL --cpu 32GiB, or give --model MODEL")
    if parsed.model_tag is not None:
        raise ConfigError(
            f"{parsed.model_tag!r} belongs to no flag: write the model first, and a size as one word, such as 32GiB"
        )
    if parsed.kv_transfer_config is not None:
        raise ConfigError(
            "--kv-transfer-config is made from --cpu and --disk: leave it out, or take what --dry-run prints, change "
            "it, and start vLLM with it"
        )
    for flag, is_given in (
        ("--headless", parsed.headless),
        ("--grpc", parsed.grpc),
        ("--api-server-count", parsed.api_server_count not in (None, 1)),
    ):
        if is_given:
            raise ConfigError(
                f"{flag} is known to `vllm serve` alone: leave it out, or give that the JSON that --dry-run prints"
            )
    validate_parsed_serve_args(parsed)
    return parsed


def _require_configuration(model: str, revision: str | None, may_fetch: bool) -> None:
    """vLLM would speak of repositories and revisions. Raises ConfigError."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (Path(model) / "config.json").is_file():
        return
    why = ""
    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
        if may_fetch:
            hf_hub_download(model, "config.json", revision=revision)
            return
    except HFValidationError as error:
        raise ConfigError(
            f"{model} is no directory with a config.json: give the directory of the model, or its name"
        ) from error
    except OSError as error:
        why = f", and could not be fetched ({_sentence(error).rstrip('.')})"
    raise ConfigError(
        f"{model} is neither a directory with a config.json nor in the local cache of transformers{why}: give such a "
        f"directory, or load it once with `hf download {model} config.json`"
    )


def _layout(parsed: Any, kv_transfer_config: dict[str, Any]) -> EngineLayout:
    from vllm import __version__
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from vllm_overlay.connector.lookahead import lookahead_units

    os.environ[_CACHE_GIB] = _STATIC_GIB
    arguments = AsyncEngineArgs.from_cli_args(Namespace(**{**vars(parsed), **_WITHOUT_WEIGHTS, **_ONE_ENGINE}))
    arguments.enable_prefix_caching = parsed.enable_prefix_caching is not False
    arguments.kv_transfer_config = KVTransferConfig(**kv_transfer_config)
    vllm_config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
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
        node_bytes=_node_bytes(),
        has_dropping_drafter=lookahead_units(vllm_config, 1) > 0,
    )


def _build_on_meta(vllm_config: Any) -> None:
    """Registers the layers of one rank, a drafter's too. Nobody computes, so it is one process that says it is one of
    several."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as directory:
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/store", 0, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        parallel_state.get_tp_group().world_size = vllm_config.parallel_config.tensor_parallel_size
        with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config)
            speculative = vllm_config.speculative_config
            if speculative is not None and speculative.use_eagle():
                drafter_config = speculative.apply_draft_overrides(vllm_config)
                initialize_model(drafter_config, model_config=speculative.draft_model_config)


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
    for child in vllm_config.kv_transfer_config.kv_connector_extra_config.get("connectors", ()):
        check_supported(vllm_config, kv_cache_config, tier_spec(child["kv_connector_extra_config"]))
    if states_end_with_requests(kv_cache_config):
        is_on = vllm_config.cache_config.enable_prefix_caching
        why = "" if is_on else " without the prefix cache: leave out --no-enable-prefix-caching"
        raise ConfigError(f"vLLM keeps this model's states only while a request runs{why}; nothing could be restored")
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
