# SPDX-License-Identifier: Apache-2.0
"""Every setting of the disk tier, its default, unit and check. The README's table is tested against this file."""

from typing import Annotated, Literal

from msgspec import Meta

from vllm_overlay.config import TierSettings


class DiskTierSettings(TierSettings, kw_only=True, forbid_unknown_fields=True):
    """The disk tier."""

    tier: str = "disk"
    root: Annotated[
        str,
        Meta(
            description="directory of the objects: a root, an empty directory, or one that is not there (made with "
            "mode 0700)",
            examples=["/var/cache/vllm-kv"],
            min_length=1,
        ),
    ]
    capacity_bytes: Annotated[
        int | str, Meta(description='limit of all objects under `root`, of every process; bytes or `"4 GiB"`')
    ] = "20 GiB"
    min_free_bytes: Annotated[
        int | str, Meta(description="free space of the file system below which nothing is written")
    ] = "1 GiB"
    max_write_bytes_per_s: Annotated[
        int | str, Meta(description="what this engine, all ranks together, writes in a second; 0: no limit")
    ] = 0
    store_on_nth_use: Annotated[
        int, Meta(description="an object is written when it could be stored for the n-th time; 1: at once", ge=1)
    ] = 1
    staging_bytes: Annotated[int | str, Meta(description="host memory a rank between the KV cache and the disk")] = (
        "256 MiB"
    )
    read_threads: Annotated[int, Meta(description="threads a rank that read", ge=1, le=64)] = 4
    write_threads: Annotated[int, Meta(description="threads a rank that write", ge=1, le=64)] = 2
    direct_io: Annotated[
        Literal["auto", "off"], Meta(description="`auto` uses O_DIRECT where the file system takes it")
    ] = "auto"
    namespace: Annotated[
        str,
        Meta(
            description="stands for the weights in the fingerprint when they are not safetensors files on disk",
            examples=["qwen3.5-35b-rev7"],
        ),
    ] = ""
    integrity_key_file: Annotated[
        str,
        Meta(
            description="private file of at least 32 bytes; what was not written with this key is a miss",
            examples=["/etc/vllm/kv.key"],
        ),
    ] = ""
    encryption_key_file: Annotated[
        str,
        Meta(
            description="private file of at least 32 bytes; objects are encrypted with AES-256-GCM, and what was not "
            "written with this key is a miss; instead of `integrity_key_file`",
            examples=["/etc/vllm/kv-encryption.key"],
        ),
    ] = ""
