# SPDX-License-Identifier: Apache-2.0
"""Words in settings that are nobody's here: what another product calls something, and settings in the wrong place."""

from collections.abc import Mapping

OF_OTHERS: Mapping[str, tuple[str, ...]] = {
    "cpu_bytes_to_use": ("capacity_bytes",),
    "cpu_bytes_to_use_per_rank": ("capacity_bytes",),
    "kv_offloading_size": ("capacity_bytes",),
    "num_cpu_blocks": ("capacity_bytes",),
    "max_local_cpu_size": ("capacity_bytes",),
    "max_local_disk_size": ("capacity_bytes",),
    "host_pool_gib": ("capacity_bytes",),
    "max_size": ("capacity_bytes",),
    "size": ("capacity_bytes",),
    "size_gb": ("capacity_bytes",),
    "block_size": ("hybrid_chunk_size",),
    "chunk_size": ("hybrid_chunk_size",),
    "threads_per_gpu": ("read_threads",),
    "num_threads": ("read_threads",),
    "io_threads": ("read_threads",),
    "shared_storage_path": ("root",),
    "storage_path": ("root",),
    "local_disk": ("root",),
    "local_disk_path": ("root",),
    "root_dir": ("root",),
    "directory": ("root",),
    "path": ("root",),
    "spec_name": ("tier",),
    "backend": ("tier",),
    "cache_policy": ("eviction_policy",),
    "store_threshold": ("store_on_nth_use",),
    "kv_load_failure_policy": ("load_failure_policy",),
    "fs": ("disk",),
    "file": ("disk",),
    "ssd": ("disk",),
    "nvme": ("disk",),
    "local": ("disk",),
    "ram": ("cpu",),
    "dram": ("cpu",),
    "host": ("cpu",),
    "memory": ("cpu",),
}
"""What vLLM's connectors, llm-d's and LMCache call something, or people do -> ours."""

OF_THE_MULTI_CONNECTOR = (
    "control_file",
    "lookup_timeout_ms",
    "isolate_after_s",
    "retry_first_s",
    "retry_longest_s",
    "hang_after_s",
    "load_failure_policy",
)
"""Settings of our MultiConnector itself, which vLLM's own does not have."""

PLACES: Mapping[str, str] = {
    **dict.fromkeys(
        ("kv_connector", "kv_role", "engine_id", "kv_port", "kv_connector_module_path", "kv_connector_extra_config"),
        "the entry itself, beside kv_connector",
    ),
    **dict.fromkeys(("connectors", *OF_THE_MULTI_CONNECTOR), "the kv_connector_extra_config of the MultiConnector"),
    **dict.fromkeys(("min_tokens", "load", "store", "promote"), "a connector below a MultiConnector"),
    **dict.fromkeys(("tier", "root", "capacity_bytes", "min_free_bytes"), "the kv_connector_extra_config of a tier"),
    "prefix_match_unit": "vLLM's flag --prefix-match-unit",
    "mamba_cache_mode": "vLLM's flag --mamba-cache-mode",
}
"""Setting -> where it is to be written, if not here."""
