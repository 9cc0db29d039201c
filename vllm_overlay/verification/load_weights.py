# SPDX-License-Identifier: Apache-2.0
"""Server arguments under which a MultiConnector loads whatever its children offer."""

import json
from collections.abc import Sequence
from typing import Any

_OPTIONS = ("--kv-transfer-config", "--kv_transfer_config")
_ALWAYS = 1.0


def with_fixed_load_weights(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``load_weight`` 1.0 for each child of a MultiConnector whose weight is measured.

    A measured weight leaves an offer where computing is faster, and what is not restored is not verified. An argument
    that cannot be read stays as it is: the server refuses it in its own words.
    """
    fixed: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option in _OPTIONS and equals:
            fixed.append(f"{option}={_with_fixed_children(value)}")
        elif fixed and fixed[-1] in _OPTIONS:
            fixed.append(_with_fixed_children(argument))
        else:
            fixed.append(argument)
    return fixed


def _with_fixed_children(text: str) -> str:
    try:
        config = json.loads(text)
        measured = [extra for extra in map(_extra_of, _children(config)) if extra.get("load_weight", "auto") == "auto"]
    except (ValueError, TypeError, AttributeError, KeyError):
        return text
    for extra in measured:
        extra["load_weight"] = _ALWAYS
    return json.dumps(config) if measured else text


def _children(config: Any) -> list[Any]:
    """None for a connector without children."""
    children: list[Any] = config.get("kv_connector_extra_config", {}).get("connectors", [])
    return children


def _extra_of(child: Any) -> dict[str, Any]:
    extra: dict[str, Any] = child.setdefault("kv_connector_extra_config", {})
    return extra
