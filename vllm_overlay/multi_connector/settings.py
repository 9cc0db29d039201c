# SPDX-License-Identifier: Apache-2.0
"""What a MultiConnector takes in ``kv_connector_extra_config``, and the children it describes."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.config import ConfigError, MaxLoadAttempts, load_weight_of
from vllm_overlay.multi_connector.selection_rules.factory import RULES
from vllm_overlay.multi_connector.stats import OWN


class MultiSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of the MultiConnector itself; a child's own are in the child's ``kv_connector_extra_config``."""

    connectors: Annotated[
        list[dict[str, Any]],
        Meta(description="the children, in order; each takes the fields of `--kv-transfer-config`"),
    ]
    selection: Annotated[
        str,
        Meta(
            description="who loads: `weighted`, the highest tokens x load_weight; `cost`, the most seconds saved; "
            "`module:Class`, a rule of your own"
        ),
    ] = "weighted"
    lookup_timeout_ms: Annotated[
        float,
        Meta(description="ms a request waits for children still looking, when one could beat the ready offers", ge=0),
    ] = 50.0
    isolate_after_s: Annotated[
        float,
        Meta(
            description="seconds after which a load that its child has not reported isolates the child; 0: never", ge=0
        ),
    ] = 120.0
    retry_first_s: Annotated[
        float, Meta(description="seconds a child stays out of service after its first failure; doubles each time", gt=0)
    ] = 1.0
    retry_longest_s: Annotated[
        float, Meta(description="the longest such pause; serving for as long makes the next failure a first one", gt=0)
    ] = 60.0
    hang_after_s: Annotated[
        float,
        Meta(
            description="seconds in one hook after which the log names the child; once back, it is isolated; 0: off",
            ge=0,
        ),
    ] = 30.0
    control_file: Annotated[
        str, Meta(description="a JSON file that changes the children's switches while serving; re-read when it changes")
    ] = ""


RENAMED = {
    "max_load_attempts": "it is now max_load_attempts in the kv_connector_extra_config of each child",
    "load_timeout_s": "it is now isolate_after_s",
}
"""Settings that the MultiConnector had, and what to write now."""


class ChildSettings(msgspec.Struct, kw_only=True, frozen=True):
    """What any connector may carry in its ``kv_connector_extra_config`` as a child of the MultiConnector."""

    load_weight: Annotated[float, Meta(description="weight of what it offers: `matched_tokens x load_weight`")] = 1.0
    max_load_attempts: MaxLoadAttempts = 3
    min_tokens: Annotated[int, Meta(description="an offer of fewer tokens counts as none", ge=0)] = 0
    load: Annotated[bool, Meta(description="whether requests are loaded from it")] = True
    store: Annotated[bool, Meta(description="whether it stores requests")] = True
    promote: Annotated[bool, Meta(description="whether it stores requests that another child loads")] = True


_OURS_ALONE = ("min_tokens", "load", "store", "promote")
"""Settings that the child itself is not shown: it may refuse what it does not know."""

_SHARED = ("load_weight", "max_load_attempts")
"""Settings that the child is shown too: our own tiers have them under the same names."""


@dataclass(slots=True, frozen=True)
class ChildSpec:
    """One configured child, not built yet."""

    name: str
    settings: ChildSettings
    cls: type[Any]
    kv_transfer_config: KVTransferConfig

    def vllm_config(self, parent: VllmConfig) -> VllmConfig:
        """The child's own copy of the configuration, with its own ``kv_transfer_config``."""
        child = copy.copy(parent)
        child.kv_transfer_config = self.kv_transfer_config
        return child


def multi_settings(extra_config: Mapping[str, Any]) -> MultiSettings:
    """The checked settings; raises ConfigError."""
    known = [field.name for field in msgspec.structs.fields(MultiSettings)]
    if renamed := sorted(set(extra_config) & set(RENAMED)):
        raise ConfigError(f"{renamed[0]} is no setting of the MultiConnector any more: {RENAMED[renamed[0]]}")
    if unknown := sorted(set(extra_config) - set(known)):
        raise ConfigError(f"unknown setting {unknown[0]!r} of the MultiConnector: it takes {', '.join(known)}")
    if not extra_config.get("connectors"):
        raise ConfigError(
            "the MultiConnector has no children: set kv_connector_extra_config.connectors to a list such as "
            '[{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]'
        )
    try:
        settings = msgspec.convert(dict(extra_config), MultiSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"MultiConnector: {error}") from error
    RULES.find(settings.selection)
    return settings


def child_specs(
    extra_config: Mapping[str, Any], kv_role: str | None, engine_id: str | None, kv_load_failure_policy: str = "fail"
) -> list[ChildSpec]:
    """The configured children, their names made unique; raises ConfigError naming the child.

    A child that gives no ``kv_role``, ``engine_id`` or ``kv_load_failure_policy`` inherits the given ones.
    """
    inherited = {"kv_role": kv_role, "engine_id": engine_id, "kv_load_failure_policy": kv_load_failure_policy}
    entries = multi_settings(extra_config).connectors
    names = _names(entries)
    return [_child_spec(entry, name, inherited) for entry, name in zip(entries, names, strict=True)]


def _extra_of(entry: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    extra = entry.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_connector_extra_config of {label} must be a mapping such as {{}}, not {extra!r}")
    return extra


def _names(entries: list[dict[str, Any]]) -> list[str]:
    given: list[str | None] = []
    for position, entry in enumerate(entries):
        name = _extra_of(entry, f"connector {position} of the MultiConnector").get("name")
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f'name={name!r} of connector {position} must be a word such as "cpu"')
        if name == OWN:
            raise ConfigError(
                f'name="{OWN}" of connector {position} is taken by the statistics: use a word such as "cpu"'
            )
        if name is not None and name in given:
            raise ConfigError(f"two connectors of the MultiConnector have the name {name!r}: give each its own")
        given.append(name)
    taken = {name for name in given if name is not None}
    names: list[str] = []
    for entry, name in zip(entries, given, strict=True):
        if name is None:
            base = str(entry.get("kv_connector"))
            candidates = [base, *(f"{base}#{n}" for n in range(2, len(entries) + 2))]
            name = next(candidate for candidate in candidates if candidate not in taken)
            taken.add(name)
        names.append(name)
    return names


def _child_spec(entry: Mapping[str, Any], name: str, inherited: Mapping[str, Any]) -> ChildSpec:
    known = [field.name for field in dataclasses.fields(KVTransferConfig)]
    if unknown := sorted(set(entry) - set(known)):
        hint = (
            "it belongs in this connector's kv_connector_extra_config"
            if unknown[0] in ("name", "tier", *_SHARED, *_OURS_ALONE)
            else f"it takes {', '.join(known)}, and what is the connector's own goes in kv_connector_extra_config"
        )
        raise ConfigError(f"unknown key {unknown[0]!r} of connector {name!r}: {hint}")
    if not isinstance(entry.get("kv_connector"), str):
        raise ConfigError(f"kv_connector={entry.get('kv_connector')!r} of connector {name!r} must be a class name")
    settings = _child_settings(_extra_of(entry, f"connector {name!r}"), name)
    try:
        # The child gets its own copy of the nested settings: what it changes there is not its siblings' or ours.
        config = KVTransferConfig(**{**inherited, **copy.deepcopy(dict(entry))})
        for setting in _OURS_ALONE:
            config.kv_connector_extra_config.pop(setting, None)
        cls = KVConnectorFactory.get_connector_class(config)
    except SHUTDOWN:
        raise
    except BaseException as error:
        raise ConfigError(f"connector {name!r} cannot be configured: {_sentence(error)}") from error
    return ChildSpec(name, settings, cls, config)


def _child_settings(extra: Mapping[str, Any], name: str) -> ChildSettings:
    given = {setting: extra[setting] for setting in (*_SHARED, *_OURS_ALONE) if setting in extra}
    try:
        return msgspec.convert({**given, "load_weight": load_weight_of(extra, name)}, ChildSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"connector {name!r}: {error}") from error


def _sentence(error: BaseException) -> str:
    """One line for an error; pydantic's are several."""
    details = getattr(error, "errors", None)
    if callable(details):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in details())
    return " ".join(str(error).split()) or type(error).__name__
