# SPDX-License-Identifier: Apache-2.0
"""What is refused when vLLM makes its configuration, minutes before a worker would have refused it.

The plug-in registers ``check`` with vLLM (patch 0022). A configuration without anything of ours is left alone. vLLM's
own MultiConnector over our tiers is refused and not replaced by ours: what runs is what is written.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_overlay.config import ConfigError
from vllm_overlay.named_child import NamedChild
from vllm_overlay.plugin import CONNECTORS
from vllm_overlay.settings.check import did_you_mean, nearest
from vllm_overlay.settings.foreign_names import OF_THE_MULTI_CONNECTOR

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

_PACKAGE = __name__.partition(".")[0]
_MODULES = {"MultiConnector": "vllm_overlay.multi_connector"} | {name: path for name, (path, _) in CONNECTORS.items()}
_OF_A_CHILD = ("load_weight", "min_tokens", "promote")


def check(vllm_config: "VllmConfig") -> None:
    """Called by vLLM with each configuration that has a ``kv_transfer_config``; raises ConfigError."""
    config = vllm_config.kv_transfer_config
    if config is None:
        return
    if config.kv_connector == "OffloadingConnector" and not config.kv_connector_module_path:
        _check_settings(config).check_engine(vllm_config)  # the plug-in's class: it may have a tier of ours
        return
    if not (of_us := next(_ours(config), "")):
        return
    name = config.kv_connector
    if (size := vllm_config.cache_config.kv_offloading_size) is not None:
        raise ConfigError(
            f"--kv-offloading-size {size:g} would put vLLM's own connector in the place of kv_connector={name!r}: "
            f'remove the flag, and give a tier the size with "capacity_bytes": "{size:g} GiB"'
        )
    if name == "MultiConnector" and not config.kv_connector_module_path:
        raise ConfigError(
            f'kv_connector="MultiConnector" is vLLM\'s own, which cannot serve {of_us}: write '
            f'"kv_connector_module_path": "{_MODULES[name]}" beside it'
        )
    _check_settings(config)


def _ours(config: "KVTransferConfig") -> Iterator[str]:
    """What of a configuration is ours, in words."""
    if _is_ours(config.kv_connector, config.kv_connector_module_path):
        yield str(config.kv_connector)
    if config.kv_connector != "MultiConnector" or config.kv_connector_module_path:
        return
    for child in config.child_connectors:
        if _is_ours(child["kv_connector"], child.get("kv_connector_module_path")):
            yield f"a {child['kv_connector']}"
        yield from (f"the setting {name}" for name in _OF_A_CHILD if name in _extra_of(child))
    yield from (f"the setting {name}" for name in OF_THE_MULTI_CONNECTOR if name in config.kv_connector_extra_config)


def _extra_of(child: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = child.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}


def _is_ours(name: object, path: object) -> bool:
    if isinstance(path, str) and path:
        return re.split(r"\W", path.strip())[0] == _PACKAGE
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    known = KVConnectorFactory._registry
    return name in CONNECTORS or (name not in known and nearest(_last_part(name), known) in CONNECTORS)


def _last_part(name: object) -> str:
    """The class, where somebody has written its module before it."""
    return str(name).rpartition(".")[2].rpartition(":")[2]


def _check_settings(config: "KVTransferConfig") -> Any:
    """As far as they can be checked without a model: by the connector's own class, which it returns."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name, path = config.kv_connector, config.kv_connector_module_path
    try:
        cls: Any = KVConnectorFactory.get_connector_class(config)
    except (ImportError, AttributeError, ValueError) as error:
        where = f" in kv_connector_module_path={path!r}" if path is not None else ""
        works = " or ".join(f"{known} in {module}" for known, module in _MODULES.items())
        hint = did_you_mean(_last_part(name), _MODULES) if name not in _MODULES else ""
        raise ConfigError(f"kv_connector={name!r}{where} is not there: ours are {works}{hint}") from error
    if issubclass(cls, NamedChild):
        cls.check_child(config.kv_connector_extra_config)
    else:
        cls.all_children_support_hma(config)
    return cls
