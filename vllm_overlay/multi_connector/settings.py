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

from vllm_overlay.config import ConfigError, load_weight_of
from vllm_overlay.multi_connector.stats import OWN


class MultiSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of the MultiConnector itself; a child's own are in the child's ``kv_connector_extra_config``."""

    connectors: Annotated[
        list[dict[str, Any]],
        Meta(description="the children, in order; each takes the fields of `--kv-transfer-config`"),
    ]
    lookup_timeout_ms: Annotated[
        float,
        Meta(description="ms a request waits for children still looking, when one could beat the ready offers", ge=0),
    ] = 50.0
    max_load_attempts: Annotated[
        int, Meta(description="failed loads of one request after which a child is not chosen for it again", ge=1)
    ] = 3


@dataclass(slots=True, frozen=True)
class ChildSpec:
    """One configured child, not built yet."""

    name: str
    weight: float
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
    if unknown := sorted(set(extra_config) - set(known)):
        raise ConfigError(f"unknown setting {unknown[0]!r} of the MultiConnector: it takes {', '.join(known)}")
    if not extra_config.get("connectors"):
        raise ConfigError(
            "the MultiConnector has no children: set kv_connector_extra_config.connectors to a list such as "
            '[{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]'
        )
    try:
        return msgspec.convert(dict(extra_config), MultiSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"MultiConnector: {error}") from error


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
            if unknown[0] in ("name", "load_weight", "tier")
            else f"it takes {', '.join(known)}, and what is the connector's own goes in kv_connector_extra_config"
        )
        raise ConfigError(f"unknown key {unknown[0]!r} of connector {name!r}: {hint}")
    if not isinstance(entry.get("kv_connector"), str):
        raise ConfigError(f"kv_connector={entry.get('kv_connector')!r} of connector {name!r} must be a class name")
    weight = load_weight_of(_extra_of(entry, f"connector {name!r}"), name)
    try:
        # The child gets its own copy of the nested settings: what it changes there is not its siblings' or ours.
        config = KVTransferConfig(**{**inherited, **copy.deepcopy(dict(entry))})
        cls = KVConnectorFactory.get_connector_class(config)
    except Exception as error:
        raise ConfigError(f"connector {name!r} cannot be configured: {_sentence(error)}") from error
    return ChildSpec(name, weight, cls, config)


def _sentence(error: Exception) -> str:
    """One line for an error; pydantic's are several."""
    details = getattr(error, "errors", None)
    if callable(details):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in details())
    return " ".join(str(error).split()) or type(error).__name__
