# SPDX-License-Identifier: Apache-2.0
"""Words in settings that are nobody's here: what another product calls something, and settings in the wrong place."""

from collections.abc import Mapping

_OF_OURS = {
    "capacity_bytes": "cpu_bytes_to_use cpu_bytes_to_use_per_rank kv_offloading_size num_cpu_blocks max_local_cpu_size "
    "max_local_disk_size host_pool_gib max_size size size_gb",
    "hybrid_chunk_size": "block_size chunk_size",
    "read_threads": "threads_per_gpu num_threads io_threads",
    "root": "shared_storage_path storage_path local_disk local_disk_path root_dir directory path",
    "tier": "spec_name backend",
    "eviction_policy": "cache_policy",
    "store_on_nth_use": "store_threshold",
    "load_failure_policy": "kv_load_failure_policy",
    "disk": "fs file ssd nvme local",
    "cpu": "ram dram host memory",
}
OF_OTHERS: Mapping[str, str] = {other: ours for ours, others in _OF_OURS.items() for other in others.split()}
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

OF_A_CHILD = ("min_tokens", "load", "store", "promote")
"""Settings of a connector below it that the connector itself is not shown: it may refuse what it does not know."""

PLACES: Mapping[str, str] = {
    **dict.fromkeys(
        ("kv_connector", "kv_role", "engine_id", "kv_port", "kv_connector_module_path", "kv_connector_extra_config"),
        "the entry itself, beside kv_connector",
    ),
    **dict.fromkeys(("connectors", *OF_THE_MULTI_CONNECTOR), "the kv_connector_extra_config of the MultiConnector"),
    **dict.fromkeys(OF_A_CHILD, "a connector below a MultiConnector"),
    **dict.fromkeys(("tier", "root", "capacity_bytes", "min_free_bytes"), "the kv_connector_extra_config of a tier"),
    "prefix_match_unit": "vLLM's flag --prefix-match-unit",
    "mamba_cache_mode": "vLLM's flag --mamba-cache-mode",
}
"""Setting -> where it is to be written, if not here."""
