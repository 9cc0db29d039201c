# SPDX-License-Identifier: Apache-2.0
"""Every setting, its default, unit and check. The README's tables are tested against this file."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?\s*$")
_UNITS = {None: 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence that names the setting and a value that works."""


def parse_bytes(value: object, setting: str) -> int:
    """A size in bytes from an int or a string such as ``"4 GiB"``; raises ConfigError naming ``setting``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _SIZE.match(value)):
        return int(float(match[1]) * _UNITS[match[2]])
    raise ConfigError(f'{setting}={value!r} is not a size: give bytes or a string such as "4 GiB"')


class TierSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every HybridOffloadConnector takes in ``kv_connector_extra_config``."""

    tier: Annotated[Literal["cpu", "disk"], Meta(description="which tier this connector serves")]
    name: Annotated[str, Meta(description="label `connector` of its metrics; default: the tier's name")] = ""
    load_weight: Annotated[
        float, Meta(description="weight of this child in a MultiConnector: `matched_tokens x load_weight`")
    ] = 1.0
    hybrid_chunk_size: Annotated[int | str, Meta(description='tokens in a chunk of attention KV, or `"auto"`')] = "auto"
    load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(description="what a failed load does to its request (vLLM's own default is `fail`)"),
    ] = "recompute"
    max_load_attempts: Annotated[
        int, Meta(description="failed loads of one request after which it is computed without this tier", ge=1)
    ] = 3
    load_timeout_s: Annotated[
        float, Meta(description="seconds after which a load is given up and its request computed", gt=0)
    ] = 30.0
    report_timeout_s: Annotated[
        float, Meta(description="seconds after which a store or load that no worker reported is written off", gt=0)
    ] = 120.0


class CpuTierSettings(TierSettings, kw_only=True, forbid_unknown_fields=True):
    """The CPU tier."""

    tier: Literal["cpu"] = "cpu"
    capacity_bytes: Annotated[
        int | str, Meta(description='host memory of this engine, all ranks together; bytes or `"4 GiB"`')
    ] = "4 GiB"


class DiskTierSettings(TierSettings, kw_only=True, forbid_unknown_fields=True):
    """The disk tier."""

    tier: Literal["disk"] = "disk"
    root: Annotated[str, Meta(description="directory of the objects; created with mode 0700")]
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
        Meta(description="stands for the weights in the fingerprint when they are not safetensors files on disk"),
    ] = ""
    integrity_key_file: Annotated[
        str,
        Meta(description="private file of at least 32 bytes; what was not written with this key is a miss"),
    ] = ""
    shutdown_timeout_s: Annotated[
        float, Meta(description="seconds that pending stores are given at shutdown", ge=0)
    ] = 4.0


AnySettings = TypeVar("AnySettings", bound=TierSettings)
_BY_TIER: dict[str, type[TierSettings]] = {"cpu": CpuTierSettings, "disk": DiskTierSettings}


def load_weight_of(extra_config: Mapping[str, Any], name: str) -> float:
    """The checked ``load_weight`` of a MultiConnector's child; any connector may carry one."""
    weight = extra_config.get("load_weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"load_weight={weight!r} of connector {name!r} must be a number of at least 0, such as 1.0")
    return float(weight)


def tier_settings(extra_config: Mapping[str, Any]) -> CpuTierSettings | DiskTierSettings:
    """The checked settings of one HybridOffloadConnector; raises ConfigError."""
    tier = extra_config.get("tier")
    if not isinstance(tier, str) or tier not in _BY_TIER:
        raise ConfigError(f'tier={tier!r} is not a tier: set kv_connector_extra_config.tier to "cpu" or "disk"')
    cls = _BY_TIER[tier]
    known = {field.name for field in msgspec.structs.fields(cls)}
    if unknown := sorted(set(extra_config) - known):
        raise ConfigError(f"unknown setting {unknown[0]!r} of the {tier} tier: it takes {', '.join(sorted(known))}")
    load_weight_of(extra_config, str(extra_config.get("name") or tier))
    try:
        settings = msgspec.convert(dict(extra_config), cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{tier} tier: {error}") from error
    settings.name = settings.name or settings.tier
    for field in msgspec.structs.fields(cls):
        if field.name.endswith(("_bytes", "_bytes_per_s")):
            setattr(settings, field.name, parse_bytes(getattr(settings, field.name), field.name))
    assert isinstance(settings, CpuTierSettings | DiskTierSettings)
    return settings
