# SPDX-License-Identifier: Apache-2.0
"""Every setting of the disk tier, its default, unit and check. A table of docs/configuration.md is made from it."""

from typing import Annotated, Literal

from msgspec import Meta

from vllm_overlay.config import IS_A_PATH, TierSettings


class DiskTierSettings(TierSettings, kw_only=True):
    """The disk tier."""

    tier: str = "disk"
    root: Annotated[
        str,
        Meta(
            description="Directory of the objects: a root, an empty directory, or one that is not there yet. "
            "A new one gets mode 0700.",
            examples=["/var/cache/vllm-kv"],
            min_length=1,
            extra=IS_A_PATH,
        ),
    ]
    host_name: Annotated[
        str,
        Meta(
            description="Names this host's directory in a `root` that is not on a local disk, where each host has its "
            "own. A new container must have the name of the one that it follows. Default: the machine's id.",
            examples=["node-7"],
        ),
    ] = ""
    capacity_bytes: Annotated[
        int | str, Meta(description="Limit of all objects under `root`, of all processes together.")
    ] = "20 GiB"
    min_free_bytes: Annotated[
        int | str, Meta(description="Nothing is written while the file system has less free space than this.")
    ] = "1 GiB"
    max_write_bytes_per_s: Annotated[
        int | str, Meta(description="Bytes that this engine may write in a second, all ranks together. 0: no limit.")
    ] = 0
    store_on_nth_use: Annotated[
        int, Meta(description="An object is written when it could be stored for the n-th time. 1: at once.", ge=1)
    ] = 1
    staging_bytes: Annotated[
        int | str,
        Meta(
            description="Host memory of each rank between the KV cache and the disk. 0: for what four full steps "
            "store, from 256 MiB to 4 GiB."
        ),
    ] = 0
    read_threads: Annotated[int, Meta(description="Threads of each rank that read.", ge=1, le=64)] = 4
    write_threads: Annotated[int, Meta(description="Threads of each rank that write.", ge=1, le=64)] = 2
    direct_io: Annotated[
        Literal["auto", "off"], Meta(description="`auto`: O_DIRECT where the file system takes it.")
    ] = "auto"
    namespace: Annotated[
        str,
        Meta(
            description="A name for exactly these weights, needed where they are not safetensors files on disk.",
            examples=["qwen3.5-35b-rev7"],
        ),
    ] = ""
    encryption_key_file: Annotated[
        str,
        Meta(
            description="A private file of at least 32 bytes. Objects are encrypted with AES-256-GCM. What was not "
            "written with this key is a miss.",
            examples=["/etc/vllm/kv-encryption.key"],
            extra=IS_A_PATH,
        ),
    ] = ""
