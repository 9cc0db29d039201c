# SPDX-License-Identifier: Apache-2.0
"""What the numbers on disk depend on: two digests, one for attention chunks, one for snapshots.

Attention chunks are stored in one canonical order, so their fingerprint names only what changes the numbers; where
they are made of opaque cells, also what a cell is. Snapshots are raw pages: theirs adds how the pages are laid out, and
by which backend and vLLM version.
"""

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from vllm_overlay import versions
from vllm_overlay.common.atomic_file import replace_file
from vllm_overlay.common.file_lock import locked_if_possible
from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.base import Fingerprints

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype"}


class FileDigest(msgspec.Struct, frozen=True):
    """A weight file's digest and what identifies the file it was made of."""

    size: int
    mtime_ns: int
    inode: int
    digest: str


def compute_fingerprints(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    geometry: Geometry,
    page_facts: tuple[str, ...],
    cell_facts: Mapping[int, str],
    weights_name: str,
    cache_directory: Path,
    facts: Mapping[str, Any],
) -> Fingerprints:
    """The fingerprints of this engine's objects. Called by a tier in every worker, at start.

    From ``weights_name`` on the arguments are the tier's: see ``Fingerprinter``. The weights are read at most once.

    Args:
        page_facts: Everything that decides what a raw page's bytes mean.
        cell_facts: For each group that is cut in opaque cells, their order and what is in one. The other groups have
            the canonical order of keys and values, and no fact, so that their digests stay those of older versions.
    """
    import vllm

    weights = _weights_identity(vllm_config, weights_name, cache_directory)
    attention = {
        **_attention_facts(vllm_config, kv_cache_config, weights, geometry, page_facts, cell_facts),
        **facts,
    }
    snapshot = {**attention, "vllm": vllm.__version__, "pages": page_facts}
    description = {"model": str(vllm_config.model_config.model), **snapshot}
    return Fingerprints(_digest(attention), _digest(snapshot), description)


def _attention_facts(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    weights: str,
    geometry: Geometry,
    page_facts: tuple[str, ...],
    cell_facts: Mapping[int, str],
) -> dict[str, Any]:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    groups = [
        {
            "tag": geometry.tag(group),
            "layers": list(kv_cache_config.kv_cache_groups[group.group_id].layer_names),
            "token_bytes": group.token_bytes,
            "whole_pages": None if geometry.is_splittable(group) else page_facts,
            **({"cells": cell_facts[group.group_id]} if group.group_id in cell_facts else {}),
        }
        for group in geometry.attention
    ]
    return {
        "format": versions.FINGERPRINT,
        "weights": weights,
        "config": config,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "hash": [cache.prefix_caching_hash_algo, os.getenv("PYTHONHASHSEED"), geometry.match_unit],
        "chunk_size": geometry.chunk_size,
        "groups": groups,
    }


def _digest(facts: dict[str, Any]) -> str:
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _weights_identity(vllm_config: "VllmConfig", name: str, cache_directory: Path) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    if name:
        return f"namespace:{name} revision:{model.revision}"
    files = _safetensors_files(model.model, model.revision) if load.load_format in ("auto", "safetensors") else []
    if not files:
        raise ConfigError(
            f"the weights of {model.model} (load format {load.load_format}) are not safetensors files on this machine, "
            "so the disk tier cannot tell them from others: set namespace to a name for exactly these weights, "
            'such as "my-model-2026-11"'
        )
    return weights_digest(files, cache_directory / "weights.json")


def _safetensors_files(model: str, revision: str | None) -> list[Path]:
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            directory = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
            return []
    return sorted(directory.glob("*.safetensors"))


def weights_digest(files: Iterable[Path], cache_file: Path) -> str:
    """One digest of all bytes of ``files``; a file is read again only when its size, mtime or inode has changed.

    One process reads at a time, so that the ranks of an engine do the work once.
    """
    with locked_if_possible(str(cache_file.with_suffix(".lock"))):
        known = _read_cache(cache_file)
        found = {str(path.resolve()): _known_or_new(path, known) for path in files}
        if known != {**known, **found}:
            _write_cache(cache_file, {**known, **found})
    total = blake3()
    for name, entry in found.items():
        total.update(f"{Path(name).name}:{entry.digest};".encode())
    return total.hexdigest()


def _known_or_new(path: Path, known: dict[str, FileDigest]) -> FileDigest:
    stat = path.stat()
    entry = known.get(str(path.resolve()))
    if entry is not None and (entry.size, entry.mtime_ns, entry.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino):
        return entry
    return FileDigest(stat.st_size, stat.st_mtime_ns, stat.st_ino, _file_digest(path, stat.st_size))


def _file_digest(path: Path, num_bytes: int) -> str:
    started = time.monotonic()
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    logger.info("Read %s (%.1f MB) for its fingerprint in %.1f s", path, num_bytes / 1e6, time.monotonic() - started)
    return digest


def _read_cache(cache_file: Path) -> dict[str, FileDigest]:
    try:
        return msgspec.json.decode(cache_file.read_bytes(), type=dict[str, FileDigest])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_cache(cache_file: Path, entries: dict[str, FileDigest]) -> None:
    """Best effort: without it the next start reads the weights again."""
    try:
        replace_file(cache_file, msgspec.json.encode(entries))
    except OSError as error:
        logger.warning("Cannot keep the weights' digests in %s: %s", cache_file, error)
