# SPDX-License-Identifier: Apache-2.0
"""What a MultiConnector takes in ``kv_connector_extra_config``, and what every child of it may carry there."""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_overlay.config import IS_A_PATH, ConfigError, MaxLoadAttempts, load_weight_of
from vllm_overlay.settings.check import checked, refuse_unknown


class MultiSettings(msgspec.Struct, kw_only=True):
    """The settings of the MultiConnector itself; a child's own are in the child's ``kv_connector_extra_config``."""

    connectors: Annotated[
        list[dict[str, Any]],
        Meta(
            description="The children, in order. Each takes the fields of `--kv-transfer-config`.",
            examples=[[{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]],
        ),
    ]
    lookup_timeout_ms: Annotated[
        float,
        Meta(
            description="Milliseconds that a request waits for children that are still looking, "
            "if one of them could beat the ready offers. For vLLM's OffloadingConnector with secondary tiers, which "
            "reads meanwhile, it waits longer where that pays.",
            ge=0,
        ),
    ] = 50.0
    isolate_after_s: Annotated[
        float,
        Meta(
            description="Seconds that a child may take to report a load. After that the child is isolated. "
            "0: no limit.",
            ge=0,
        ),
    ] = 120.0
    retry_first_s: Annotated[
        float,
        Meta(
            description="Seconds that a child stays out of service after its first failure. "
            "Each further failure doubles them.",
            gt=0,
        ),
    ] = 1.0
    retry_longest_s: Annotated[
        float,
        Meta(
            description="The longest such pause in seconds. After a child has served for as long, "
            "its next failure counts as the first.",
            gt=0,
        ),
    ] = 60.0
    hang_after_s: Annotated[
        float,
        Meta(
            description="Seconds that a hook may take. After that the log names the child, "
            "and the child is isolated when the hook returns. 0: no limit.",
            ge=0,
        ),
    ] = 30.0
    control_file: Annotated[
        str,
        Meta(
            description="A JSON file that changes the children's switches while the server runs. "
            "It is read again when it changes.",
            examples=["/etc/vllm/switches.json"],
            extra=IS_A_PATH,
        ),
    ] = ""
    load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description="What a failed load does to its request, whichever child it was: compute it, "
            "or end it with an error (vLLM's own default is `fail`)."
        ),
    ] = "recompute"


class ChildSettings(msgspec.Struct, kw_only=True, frozen=True):
    """What any connector may carry in its ``kv_connector_extra_config`` as a child of the MultiConnector."""

    load_weight: Annotated[
        float | Literal["auto"],
        Meta(
            description="Weight of what it offers: `matched_tokens x load_weight`. "
            "`auto`: measured, as the share of the computing time that its loads save."
        ),
    ] = "auto"
    max_load_attempts: MaxLoadAttempts = 3
    min_tokens: Annotated[int, Meta(description="An offer of fewer tokens counts as none.", ge=0)] = 0
    load: Annotated[bool, Meta(description="Whether requests are loaded from it.")] = True
    store: Annotated[bool, Meta(description="Whether it stores requests.")] = True
    promote: Annotated[bool, Meta(description="Whether it stores requests that another child loads.")] = True


THE_MULTI_CONNECTOR = "the MultiConnector"
_OF_A_CHILD = dict.fromkeys((*ChildSettings.__struct_fields__, "name"), "the kv_connector_extra_config of each child")


def multi_settings(extra_config: Mapping[str, Any]) -> MultiSettings:
    """The checked settings; raises ConfigError."""
    refuse_unknown(extra_config, MultiSettings.__struct_fields__, THE_MULTI_CONNECTOR, _OF_A_CHILD)
    if not extra_config.get("connectors"):
        raise ConfigError(
            "the MultiConnector has no children: set kv_connector_extra_config.connectors to a list such as "
            '[{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]'
        )
    settings = checked(extra_config, MultiSettings, THE_MULTI_CONNECTOR)
    if "retry_longest_s" not in extra_config:
        settings.retry_longest_s = max(settings.retry_longest_s, settings.retry_first_s)
    if settings.retry_longest_s < settings.retry_first_s:
        raise ConfigError(
            f"retry_longest_s={settings.retry_longest_s:g} of the MultiConnector is less than "
            f"retry_first_s={settings.retry_first_s:g}: set retry_longest_s to at least {settings.retry_first_s:g}"
        )
    if os.path.isdir(settings.control_file):
        works = json.dumps(os.path.join(settings.control_file, "switches.json"))
        raise ConfigError(
            f"control_file={settings.control_file!r} of the MultiConnector is a directory: set it to a file, which "
            f"need not be there yet, such as {works}"
        )
    return settings


def child_settings(extra: Mapping[str, Any], name: str) -> ChildSettings:
    given = {setting: extra[setting] for setting in ChildSettings.__struct_fields__ if setting in extra}
    return checked({**given, "load_weight": load_weight_of(extra, name)}, ChildSettings, f"connector {name!r}")
