# SPDX-License-Identifier: Apache-2.0
"""The rules that ``selection`` names. A new one is one file and one line here, or a module path and no line."""

from collections.abc import Sequence

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.load_weight import LoadWeight
from vllm_overlay.multi_connector.selection_rules.base import SelectionRule
from vllm_overlay.registry import Registry

RULES: Registry[SelectionRule] = Registry(
    "selection", SelectionRule, {"weighted": "vllm_overlay.multi_connector.selection_rules.weighted:Weighted"}
)


def make_rule(name: str, load_weights: Sequence[LoadWeight]) -> SelectionRule:
    """The rule over children with these weights. Raises ConfigError."""
    try:
        return RULES.find(name)(load_weights)
    except (ConfigError, *SHUTDOWN):
        raise
    except BaseException as error:
        known = " or ".join(f'"{one}"' for one in RULES.names)
        raise ConfigError(f"selection={name!r} cannot be started: {error}; set it to {known} instead") from error
