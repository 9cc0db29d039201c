# SPDX-License-Identifier: Apache-2.0
"""The configured children of a MultiConnector: their classes, their names, and what cannot work of them together."""

import copy
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger

from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.child import refused
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings, child_settings, multi_settings
from vllm_overlay.multi_connector.stats import OWN
from vllm_overlay.multi_connector.weights import UNKNOWN, LoadWeight
from vllm_overlay.named_child import NamedChild
from vllm_overlay.settings.check import did_you_mean, nearest, refuse_unknown
from vllm_overlay.settings.foreign_names import OF_A_CHILD

logger = init_logger(f"vllm.{__name__}")
RECOMPUTE, FAIL = "recompute", "fail"


@dataclass(slots=True, frozen=True)
class LoadFailurePolicy:
    """``value`` is one of vLLM's ``kv_load_failure_policy``; ``reason`` says who wanted it, for the log."""

    value: str
    reason: str


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
    def takes_name(self) -> bool:
        return issubclass(self.cls, NamedChild)

    @property
    def load_failure_policy(self) -> str | None:
        """What an operator wrote for this child, or None."""
        own = self.extra_config.get("load_failure_policy") if self.takes_name else None
        policy: str | None = str(own).strip().lower() if own else self.given.get("kv_load_failure_policy")
        return policy


def child_specs(
    extra_config: Mapping[str, Any], kv_role: str | None, engine_id: str | None, kv_load_failure_policy: str = "fail"
) -> list[ChildSpec]:
    """The configured children, their names made unique; raises ConfigError naming the child.

    A child that gives no ``kv_role`` or ``engine_id`` inherits the given ones.
    """
    settings = multi_settings(extra_config)
    inherited = {"kv_role": kv_role, "engine_id": engine_id}
    entries = [_entry(given, position, inherited) for position, given in enumerate(settings.connectors)]
    named = dict(zip(_names(entries), entries, strict=True))
    _check_exclusive(named)
    policy = load_failure_policy(
        settings.load_failure_policy if "load_failure_policy" in extra_config else None,
        kv_load_failure_policy,
        [name for name, entry in named.items() if entry.load_failure_policy == FAIL],
    )
    specs = [_child_spec(entry, name, policy) for name, entry in named.items()]
    _check_roles(kv_role, specs)
    _check_weights(specs)
    return specs


def _entry(given: Mapping[str, Any], position: int, inherited: Mapping[str, Any]) -> _Entry:
    extra = _extra_of(given, f"connector {position} of the MultiConnector")
    _check_name(extra.get("name"), position)
    label = str(position) if extra.get("name") is None else repr(extra["name"])
    _check_keys(given, label)
    _check_class(given, label)
    # The child gets its own copy of the nested settings: what it changes there is not its siblings' or ours.
    with refused(f"connector {label} cannot be configured"):
        config = KVTransferConfig(**{**inherited, **copy.deepcopy(dict(given))})
    if given.get("engine_id"):
        # With data parallelism vLLM makes the id at the top each rank's own in this way.
        config.engine_id += "".join(re.findall(r"_dp\d+$", inherited["engine_id"] or ""))
    for setting in OF_A_CHILD:
        config.kv_connector_extra_config.pop(setting, None)
    where = f" in kv_connector_module_path={path!r}" if (path := config.kv_connector_module_path) else ""
    with refused(f"kv_connector={config.kv_connector!r}{where} of connector {label} cannot be imported"):
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


def _check_class(given: Mapping[str, Any], label: str) -> None:
    name = given.get("kv_connector")
    if not isinstance(name, str) or not name:
        raise ConfigError(f'kv_connector={name!r} of connector {label} must be a class name, such as "NixlConnector"')
    if name == "MoRIIOConnector":
        raise ConfigError(
            f"kv_connector={name!r} of connector {label} rewrites the step's reports, which are its siblings' too: "
            'use "NixlConnector" here, or MoRIIOConnector without the MultiConnector'
        )
    if not given.get("kv_connector_module_path") and name not in KVConnectorFactory._registry:
        registered = sorted(KVConnectorFactory._registry)
        raise ConfigError(
            f"kv_connector={name!r} of connector {label} is not registered: set it to one of {', '.join(registered)}, "
            f"or set kv_connector_module_path to the module that has it{did_you_mean(name, registered)}"
        )


def _names(entries: list[_Entry]) -> list[str]:
    """Each child's ``name``, else its default name, made unique among all."""
    given = [entry.extra_config.get("name") for entry in entries]
    taken = {name for name in given if name is not None}
    if twice := [name for name in taken if given.count(name) > 1]:
        raise ConfigError(f"two connectors of the MultiConnector have the name {twice[0]!r}: give each its own")
    names: list[str] = []
    for entry, name in zip(entries, given, strict=True):
        if name is None:
            base = (entry.takes_name and entry.cls.child_name(entry.extra_config)) or str(entry.given["kv_connector"])
            candidates = [base, *(f"{base}#{n}" for n in range(2, len(entries) + 2))]
            name = next(candidate for candidate in candidates if candidate not in taken)
            taken.add(name)
        names.append(name)
    return names


def _check_exclusive(named: Mapping[str, _Entry]) -> None:
    """No two children may have what a class says that only one may have."""
    holders: dict[tuple[str, str], str] = {}
    for name, entry in named.items():
        exclusive: dict[str, str] = {}
        if entry.takes_name:
            with refused(f"connector {name!r}"):
                exclusive.update(entry.cls.check_child(entry.kv_transfer_config.kv_connector_extra_config))
        if any(cls.__name__ == "OffloadingConnector" for cls in entry.cls.__mro__):
            exclusive["engine_id"] = entry.kv_transfer_config.engine_id  # vLLM's names its shared memory by it
        for setting, value in exclusive.items():
            holder = holders.setdefault((setting, value), name)
            if holder != name:
                works = json.dumps(f"{value}-2")
                raise ConfigError(
                    f"connectors {holder!r} and {name!r} of the MultiConnector have one {setting}, {value!r}: give "
                    f"each its own, such as {works}"
                )


def load_failure_policy(own: str | None, at_top: str, failing: Sequence[str]) -> LoadFailurePolicy:
    """What a failed load does to its request. vLLM has one policy for an engine; here is whose word counts.

    vLLM's own default is to fail the request, and a ``KVTransferConfig`` does not tell that default from the same value
    set by an operator. So ``"fail"`` at the top says nothing; everywhere else it is an operator's word.

    ``own``: the MultiConnector's setting, or None. ``at_top``: ``kv_load_failure_policy`` beside ``kv_connector``.
    ``failing``: the children whose own entry says ``"fail"``.
    """
    if own is not None:
        return LoadFailurePolicy(own, "load_failure_policy of the MultiConnector says so")
    if at_top == RECOMPUTE:
        return LoadFailurePolicy(RECOMPUTE, "kv_load_failure_policy of --kv-transfer-config says so")
    if failing:
        return LoadFailurePolicy(FAIL, f"connector {', '.join(failing)} says so")
    return LoadFailurePolicy(
        RECOMPUTE,
        'that is the default; "fail" beside kv_connector cannot be told from vLLM\'s own default, so set '
        "load_failure_policy of the MultiConnector to change it",
    )


def _child_spec(entry: _Entry, name: str, policy: LoadFailurePolicy) -> ChildSpec:
    settings = child_settings(entry.extra_config, name)
    config = entry.kv_transfer_config
    config.kv_load_failure_policy = policy.value
    if entry.takes_name:
        config.kv_connector_extra_config.update(name=name, load_failure_policy=policy.value)
    if not isinstance(settings.load_weight, str):
        weight = LoadWeight(settings.load_weight)
    else:
        extra = config.kv_connector_extra_config
        weight = LoadWeight(entry.cls.prior_load_weight(extra) if entry.takes_name else UNKNOWN, is_measured=True)
    return ChildSpec(name, settings, entry.cls, config, policy, weight)


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


def announce(settings: MultiSettings, specs: Sequence[ChildSpec]) -> None:
    """What the log says at start. Called in the scheduler's process."""
    logger.info("MultiConnector: %s", start_line(settings, specs))
    loading = [spec for spec in specs if spec.settings.load]
    numbers = [spec.name for spec in loading if not spec.load_weight.is_measured]
    measured = [spec.name for spec in loading if spec.load_weight.is_measured]
    if numbers and measured:
        logger.warning(
            'load_weight of %s is a number, and of %s "auto", which is measured. A number that was not measured here '
            'makes these lose or win wrongly. Set load_weight of all to "auto", or of all to numbers.',
            ", ".join(numbers),
            ", ".join(measured),
        )
    policy = specs[0].load_failure_policy
    logger.info(
        "kv_load_failure_policy is %r for all connectors of the MultiConnector: a request whose load fails %s (%s).",
        policy.value,
        "is recomputed" if policy.value == RECOMPUTE else "is ended with an error",
        policy.reason,
    )


def start_line(settings: MultiSettings, specs: Sequence[ChildSpec]) -> str:
    """``cpu (HybridOffloadConnector, weight 1), disk (..., store off); control file ...``: what is not by default."""
    children = ", ".join(f"{spec.name} ({', '.join(_words(spec))})" for spec in specs)
    return children + (f"; control file {settings.control_file}" if settings.control_file else "")


def _words(spec: ChildSpec) -> Iterator[str]:
    own, weight = spec.settings, spec.load_weight
    yield spec.cls.__name__
    yield f"weight auto, {weight.number:g} until measured" if weight.is_measured else f"weight {weight.number:g}"
    yield from (f"{switch} off" for switch in ("load", "store", "promote") if not getattr(own, switch))
    if own.min_tokens:
        yield f"min_tokens {own.min_tokens}"
