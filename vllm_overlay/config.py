# SPDX-License-Identifier: Apache-2.0
"""The settings that every tier takes, with default, unit and check, and how sizes and weights are read."""

import contextlib
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?) *(?:([kmgtp])(i)?)?(?:b|bytes?)?", re.IGNORECASE)
_MOST_BYTES = 1 << 63
IS_A_PATH = {"kind": "path"}
"""``Meta(extra=IS_A_PATH)``: the setting is a path on this machine, and is read by ``settings.paths.parse_path``."""


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence that names the setting and a value that works."""


def parse_bytes(value: object, setting: str) -> int:
    """A size in bytes, of an int, a whole float or a string; raises ConfigError naming ``setting``.

    Units are Kubernetes' and their long forms in any case: ``4Gi`` and ``4 GiB`` are 4 * 2^30, ``4G`` and ``4gb`` are
    4 * 10^9. Helm writes large numbers as floats, such as ``6.442450944e+10``.
    """
    num_bytes = _size(value, is_rate=setting.endswith("_per_s"))
    if num_bytes is None:
        raise ConfigError(
            f"{setting}={value!r} is not a size: give bytes or a string such as "
            f'"4 GiB" (4Gi is the same, 4G is 4 * 10^9){_if_null(value)}'
        )
    return num_bytes


def as_size(num_bytes: int) -> str:
    """One word that ``parse_bytes`` reads, at most ``num_bytes`` and near it: ``"1862GiB"``."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= 10 * unit or (num_bytes >= unit and num_bytes % unit == 0):
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes}B"


def _size(value: object, is_rate: bool) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    words = str(value).strip()
    match = _SIZE.fullmatch(words.removesuffix("/s") if is_rate else words)
    if match is None:
        return None
    number, unit = Decimal(match[1]), _unit(match[2], bool(match[3]))
    if number * unit >= _MOST_BYTES:
        return None
    return int(number * unit) if unit > 1 or number == int(number) else None


def _unit(letter: str | None, is_binary: bool) -> int:
    power = "kmgtp".index(letter.lower()) + 1 if letter else 0
    return int((1024 if is_binary else 1000) ** power)


def _if_null(value: object) -> str:
    return "; leave it out for the default" if value is None else ""


MaxLoadAttempts = Annotated[
    int,
    Meta(description="After so many failed loads of one request, the connector is not used for that request.", ge=1),
]
"""Like ``load_weight`` a key of every connector below a MultiConnector; our tiers heed it when they are alone too."""


class TierSettings(msgspec.Struct, kw_only=True):
    """What every HybridOffloadConnector takes in ``kv_connector_extra_config``."""

    tier: Annotated[
        str,
        Meta(
            description='The tier that this connector serves: `"cpu"`, `"disk"`, or your own as `"module:Class"`.',
            examples=["cpu"],
        ),
    ]
    name: Annotated[
        str,
        Meta(
            description="The label `connector` of its metrics, and its key in the control file. Default: `tier`.",
            examples=["cpu"],
        ),
    ] = ""
    load_weight: Annotated[
        float | Literal["auto"],
        Meta(
            description="Weight of what it offers below a MultiConnector: `matched_tokens x load_weight`. "
            "`auto`: measured."
        ),
    ] = "auto"
    hybrid_chunk_size: Annotated[
        Annotated[int, Meta(gt=0)] | Literal["auto"],
        Meta(description="Tokens in a chunk of attention KV. `auto`: by the model's blocks."),
    ] = "auto"
    store_decoded_tokens: Annotated[
        bool | Literal["auto"],
        Meta(
            description="Whether a request's own answer is stored as decode steps wrote it. "
            "`auto`: only for models without recurrent states."
        ),
    ] = "auto"
    speculative_snapshot_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        Meta(
            description="A prefill step that ends at least so many tokens after the prompt's last snapshot leaves a "
            "snapshot too. 0: never. `auto`: 8192 with the learned policy in a tier with room for 512 states, else 0."
        ),
    ] = "auto"
    load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What a failed load does to its request: compute it, or end it with an error "
            "(vLLM's own default is `fail`)."
        ),
    ] = "recompute"
    max_load_attempts: MaxLoadAttempts = 3
    load_timeout_s: Annotated[
        float, Meta(description="Seconds that a load may take. After that its request is computed.", gt=0)
    ] = 30.0
    report_timeout_s: Annotated[
        float,
        Meta(description="Seconds that the scheduler waits for the workers' report of a store or a load.", gt=0),
    ] = 120.0
    shutdown_timeout_s: Annotated[
        float, Meta(description="Seconds that pending copies and stores have at shutdown.", ge=0)
    ] = 4.0
    device_buffer_bytes: Annotated[
        int | str,
        Meta(
            description="GPU memory of each rank for stores on their way to the host. Stores that find no room "
            "there are dropped (`transfer_full`). No effect on a CPU."
        ),
    ] = "512 MiB"
    log_lost_tokens: Annotated[
        int,
        Meta(
            description="A request that computes at least so many tokens which the tier had once is named in the log, "
            "with the reason. 0: none is.",
            ge=0,
        ),
    ] = 8192
    eviction_policy: Annotated[
        str,
        Meta(
            description="What a full tier gives up first: what is least worth its bytes (`learned`), or what was not "
            "used for longest (`lru`). A CPU tier also takes anybody's, as `module:Class`. `auto`: `learned`."
        ),
    ] = "auto"


def load_weight_of(extra_config: Mapping[str, Any], name: str) -> float | Literal["auto"]:
    """The checked ``load_weight`` of a MultiConnector's child; any connector may carry one."""
    weight = extra_config.get("load_weight", "auto")
    if isinstance(weight, str):
        if weight.strip().lower() == "auto":
            return "auto"
        with contextlib.suppress(ValueError):
            weight = float(weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ConfigError(
            f'load_weight={weight!r} of connector {name!r} must be "auto" or a number of at least 0, such as 0.8'
        )
    return float(weight)
