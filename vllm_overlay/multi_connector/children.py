# SPDX-License-Identifier: Apache-2.0
"""The configured children of a MultiConnector: their classes, their names, and what cannot work of them together."""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.load_failure import LoadFailurePolicy, load_failure_policy
from vllm_overlay.multi_connector.settings import (
    OURS_ALONE,
    ChildSettings,
    child_settings,
    multi_settings,
)
from vllm_overlay.multi_connector.stats import OWN
from vllm_overlay.multi_connector.weights import UNKNOWN, LoadWeight
from vllm_overlay.named_child import NamedChild
from vllm_overlay.setting_check import did_you_mean, nearest, refuse_unknown

logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True, frozen=True)
class ChildSpec:
    """One configured child, not built yet."""

    name: str
    settings: ChildSettings
    cls: type[Any]
    kv_transfer_config: KVTransferConfig
    load_failure_policy: LoadFailurePolicy
    """The engine's, the same for all children."""
    load_weight: LoadWeight

    def vllm_config(self, parent: VllmConfig) -> VllmConfig:
        """The child's own copy of the configuration, with its own ``kv_transfer_config``."""
        child = copy.copy(parent)
        child.kv_transfer_config = self.kv_transfer_config
        return child


@dataclass(slots=True, frozen=True)
class _Entry:
    """One entry of ``connectors`` whose class is known, and not its name yet."""

    given: Mapping[str, Any]
    extra_config: Mapping[str, Any]
    cls: type[Any]
    kv_transfer_config: KVTransferConfig

    @property
    def given_name(self) -> str | None:
        return self.extra_config.get("name")

    @property
    def default_name(self) -> str:
        named = self.cls.child_name(self.extra_config) if self.takes_name else None
        return named or str(self.given["kv_connector"])

    @property
    def takes_name(self) -> bool:
        return issubclass(self.cls, NamedChild)

    @property
    def load_failure_policy(self) -> str | None:
        """What an operator wrote for this child, or None."""
        own = self.extra_config.get("load_failure_policy") if self.takes_name else None
        policy: str | None = own or self.given.get("kv_load_failure_policy")
        return policy


def child_specs(
    extra_config: Mapping[str, Any], kv_role: str | None, engine_id: str | None, kv_load_failure_policy: str = "fail"
) -> list[ChildSpec]:
    """The configured children, their names made unique; raises ConfigError naming the child.

    A child that gives no ``kv_role`` or ``engine_id`` inherits the given ones. All have one ``kv_load_failure_policy``,
    which ``load_failure.py`` decides.
    """
    settings = multi_settings(extra_config)
    inherited = {"kv_role": kv_role, "engine_id": engine_id}
    entries = [_entry(given, position, inherited) for position, given in enumerate(settings.connectors)]
    named = dict(zip(_names(entries), entries, strict=True))
    _check_exclusive({name: _exclusive(entry, name) for name, entry in named.items()})
    policy = _policy(extra_config, kv_load_failure_policy, named)
    specs = [_child_spec(entry, name, policy) for name, entry in named.items()]
    _check_roles(kv_role, specs)
    _check_weights(specs)
    return specs


def _entry(given: Mapping[str, Any], position: int, inherited: Mapping[str, Any]) -> _Entry:
    extra = _extra_of(given, f"connector {position} of the MultiConnector")
    _check_name(extra.get("name"), position)
    label = str(position) if extra.get("name") is None else repr(extra["name"])
    _check_keys(given, label)
    # The child gets its own copy of the nested settings: what it changes there is not its siblings' or ours.
    with _refused(f"connector {label} cannot be configured"):
        config = KVTransferConfig(**{**inherited, **copy.deepcopy(dict(given))})
    for setting in OURS_ALONE:
        config.kv_connector_extra_config.pop(setting, None)
    where = f" in kv_connector_module_path={path!r}" if (path := config.kv_connector_module_path) else ""
    with _refused(f"kv_connector={config.kv_connector!r}{where} of connector {label} cannot be imported"):
        cls = KVConnectorFactory.get_connector_class(config)
        if not isinstance(cls, type):
            raise TypeError("it is no class")
    return _Entry(given, extra, cls, config)


def _extra_of(entry: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    extra = entry.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_connector_extra_config of {label} must be a mapping such as {{}}, not {extra!r}")
    return extra


def _check_name(name: object, position: int) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f'name={name!r} of connector {position} must be a word such as "cpu"')
    if name == OWN:
        raise ConfigError(f'name="{OWN}" of connector {position} is taken by the statistics: use a word such as "cpu"')


def _check_keys(given: Mapping[str, Any], label: str) -> None:
    known = [field.name for field in dataclasses.fields(KVTransferConfig)]
    inside = {key: "this connector's kv_connector_extra_config" for key in given if nearest(key, known) is None}
    refuse_unknown(given, known, f"connector {label}", inside)
    name = given.get("kv_connector")
    if not isinstance(name, str) or not name:
        raise ConfigError(f'kv_connector={name!r} of connector {label} must be a class name, such as "NixlConnector"')
    if not given.get("kv_connector_module_path") and name not in KVConnectorFactory._registry:
        registered = sorted(KVConnectorFactory._registry)
        raise ConfigError(
            f"kv_connector={name!r} of connector {label} is not registered: set it to one of {', '.join(registered)}, "
            f"or set kv_connector_module_path to the module that has it{did_you_mean(name, registered)}"
        )


def _names(entries: list[_Entry]) -> list[str]:
    """Each child's ``name``, else its default name, made unique among all."""
    given = [entry.given_name for entry in entries]
    if twice := [name for name in given if name is not None and given.count(name) > 1]:
        raise ConfigError(f"two connectors of the MultiConnector have the name {twice[0]!r}: give each its own")
    taken = {name for name in given if name is not None}
    names: list[str] = []
    for entry in entries:
        name = entry.given_name
        if name is None:
            base = entry.default_name
            candidates = [base, *(f"{base}#{n}" for n in range(2, len(entries) + 2))]
            name = next(candidate for candidate in candidates if candidate not in taken)
            taken.add(name)
        names.append(name)
    return names


def _exclusive(entry: _Entry, name: str) -> Mapping[str, str]:
    """What no other child may have."""
    if not entry.takes_name:
        return {}
    with _refused(f"connector {name!r}"):
        found: Mapping[str, str] = entry.cls.check_child(entry.kv_transfer_config.kv_connector_extra_config)
    return found


def _check_exclusive(by_child: Mapping[str, Mapping[str, str]]) -> None:
    holders: dict[tuple[str, str], str] = {}
    for name, exclusive in by_child.items():
        for setting, value in exclusive.items():
            holder = holders.setdefault((setting, value), name)
            if holder != name:
                works = json.dumps(f"{value}-2")
                raise ConfigError(
                    f"connectors {holder!r} and {name!r} of the MultiConnector have one {setting}, {value!r}: give "
                    f"each its own, such as {works}"
                )


def _policy(extra_config: Mapping[str, Any], at_top: str, named: Mapping[str, _Entry]) -> LoadFailurePolicy:
    childrens = {name: entry.load_failure_policy for name, entry in named.items()}
    said = {name: policy for name, policy in childrens.items() if policy is not None}
    return load_failure_policy(extra_config.get("load_failure_policy"), at_top, said)


def _child_spec(entry: _Entry, name: str, policy: LoadFailurePolicy) -> ChildSpec:
    settings = child_settings(entry.extra_config, name)
    config = entry.kv_transfer_config
    config.kv_load_failure_policy = policy.value
    if entry.takes_name:
        config.kv_connector_extra_config.update(name=name, load_failure_policy=policy.value)
    return ChildSpec(name, settings, entry.cls, config, policy, _load_weight(entry, settings))


def _load_weight(entry: _Entry, settings: ChildSettings) -> LoadWeight:
    if not isinstance(settings.load_weight, str):
        return LoadWeight(settings.load_weight)
    prior = (
        entry.cls.prior_load_weight(entry.kv_transfer_config.kv_connector_extra_config) if entry.takes_name else UNKNOWN
    )
    return LoadWeight(prior, is_measured=True)


def warn_of_mixed_weights(specs: Sequence[ChildSpec]) -> None:
    """Called at start in the scheduler's process."""
    numbers = [spec.name for spec in specs if spec.settings.load and not spec.load_weight.is_measured]
    measured = [spec.name for spec in specs if spec.settings.load and spec.load_weight.is_measured]
    if numbers and measured:
        logger.warning(
            'load_weight of %s is a number, and of %s "auto", which is measured. A number that was not measured here '
            'makes these lose or win wrongly. Set load_weight of all to "auto", or of all to numbers.',
            ", ".join(numbers),
            ", ".join(measured),
        )


def _check_roles(kv_role: str | None, specs: list[ChildSpec]) -> None:
    for spec in specs:
        own = spec.kv_transfer_config.kv_role
        if {kv_role, own} == {"kv_producer", "kv_consumer"}:
            raise ConfigError(
                f"kv_role={own!r} of connector {spec.name!r} contradicts kv_role={kv_role!r} of the MultiConnector: "
                'set kv_role of the MultiConnector to "kv_both"'
            )


def _check_weights(specs: list[ChildSpec]) -> None:
    children = [spec.settings for spec in specs]
    if any(one.load for one in children) and not any(one.load_weight for one in children):
        raise ConfigError(
            f"load_weight=0 of every connector of the MultiConnector ({', '.join(spec.name for spec in specs)}), so "
            'that none would ever load: set load_weight of one to "auto" or above 0, or load of each to false'
        )


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Whatever is raised becomes a ConfigError that begins with ``what``."""
    try:
        yield
    except SHUTDOWN:
        raise
    except BaseException as error:
        raise ConfigError(f"{what}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """The text of an error on one line. pydantic's errors have several."""
    details = getattr(error, "errors", None)
    if callable(details):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in details())
    return " ".join(str(error).split()) or type(error).__name__
