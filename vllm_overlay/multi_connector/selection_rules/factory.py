# SPDX-License-Identifier: Apache-2.0
"""The rules that ``selection`` names. A new one is one file and one line here, or a module path and no line."""

import importlib
from collections.abc import Sequence

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.selection_rules.base import SelectionRule
from vllm_overlay.multi_connector.selection_rules.cost import Cost
from vllm_overlay.multi_connector.selection_rules.weighted import Weighted

RULES: dict[str, type[SelectionRule]] = {"weighted": Weighted, "cost": Cost}


def rule_class(name: str) -> type[SelectionRule]:
    """The rule of that name, or at ``module:Class``. Raises ConfigError."""
    if ":" not in name:
        if name in RULES:
            return RULES[name]
        known = ", ".join(RULES)
        raise ConfigError(
            f'selection={name!r} is not a rule: known are {known}, and "module:Class" for one of your own'
        )
    module, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), class_name)
    except SHUTDOWN:
        raise
    except BaseException as error:
        raise ConfigError(f"selection={name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SelectionRule)):
        raise ConfigError(f"selection={name!r} is not a rule: it must be a subclass of {SelectionRule.__qualname__}")
    return found


def make_rule(name: str, load_weights: Sequence[float]) -> SelectionRule:
    """The rule over children with these weights. Raises ConfigError."""
    try:
        return rule_class(name)(load_weights)
    except (ConfigError, *SHUTDOWN):
        raise
    except BaseException as error:
        raise ConfigError(f"selection={name!r} cannot be started: {error}") from error
