# SPDX-License-Identifier: Apache-2.0
"""Every setting, its default, unit and check. The README's tables are tested against this file."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

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


MaxLoadAttempts = Annotated[
    int, Meta(description="failed loads of one request after which this connector is not used for it again", ge=1)
]
"""Like ``load_weight`` a key of every connector below a MultiConnector; our tiers heed it when they are alone too."""


class TierSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every HybridOffloadConnector takes in ``kv_connector_extra_config``."""

    tier: Annotated[
        str,
        Meta(
            description='which tier this connector serves: `"cpu"`, `"disk"`, or anybody\'s as `"module:Class"`',
            examples=["cpu"],
        ),
    ]
    name: Annotated[
        str,
        Meta(
            description="label `connector` of its metrics, and its key in the control file; default: `tier`",
            examples=["cpu"],
        ),
    ] = ""
    load_weight: Annotated[
        float | Literal["auto"],
        Meta(description="weight of this child in a MultiConnector: `matched_tokens x load_weight`; `auto`: measured"),
    ] = "auto"
    hybrid_chunk_size: Annotated[
        Annotated[int, Meta(gt=0)] | Literal["auto"],
        Meta(description='tokens in a chunk of attention KV, or `"auto"`'),
    ] = "auto"
    store_decoded_tokens: Annotated[
        bool | Literal["auto"],
        Meta(
            description="whether a request's own answer is stored as decode steps wrote it; "
            "`auto`: only for models without recurrent states"
        ),
    ] = "auto"
    load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(description="what a failed load does to its request (vLLM's own default is `fail`)"),
    ] = "recompute"
    max_load_attempts: MaxLoadAttempts = 3
    load_timeout_s: Annotated[
        float, Meta(description="seconds after which a load is given up and its request computed", gt=0)
    ] = 30.0
    report_timeout_s: Annotated[
        float,
        Meta(
            description="seconds after which a store or load that no worker reported is not waited for any more", gt=0
        ),
    ] = 120.0
    shutdown_timeout_s: Annotated[
        float, Meta(description="seconds that pending copies and stores are given at shutdown", ge=0)
    ] = 4.0
    device_buffer_bytes: Annotated[
        int | str,
        Meta(
            description="memory of a GPU, in each rank, for stores on their way to the host; stores that find no room "
            "are dropped (`transfer_full`). No effect on a CPU"
        ),
    ] = "512 MiB"
    eviction_policy: Annotated[
        str,
        Meta(
            description='what a full tier gives up first: `"learned"`, `"lru"`, or, in a CPU tier, anybody\'s as '
            '`"module:Class"`; `auto`: learned'
        ),
    ] = "auto"


def load_weight_of(extra_config: Mapping[str, Any], name: str) -> float | Literal["auto"]:
    """The checked ``load_weight`` of a MultiConnector's child; any connector may carry one."""
    weight = extra_config.get("load_weight", "auto")
    if weight == "auto":
        return "auto"
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ConfigError(
            f'load_weight={weight!r} of connector {name!r} must be "auto" or a number of at least 0, such as 0.8'
        )
    return float(weight)
