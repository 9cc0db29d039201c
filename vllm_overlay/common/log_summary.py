# SPDX-License-Identifier: Apache-2.0
"""What vLLM's log line says of a connector for one interval: few words, and none when there is nothing to say."""

from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def present(**values: object) -> dict[str, Any]:
    """The values that are not zero or empty, with spaces for the underscores of their names."""
    return {name.replace("_", " "): value for name, value in values.items() if value}


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole``; empty when there is no whole."""
    return f"{100 * part / whole:.1f}%" if whole else ""


def hit_rate(found: float, asked: float) -> str:
    """Of so many tokens; empty when none was asked for."""
    return f"{percent(found, asked)} of {asked:.0f} tokens" if asked else ""


def in_bytes(num_bytes: float) -> str:
    """Bytes in a readable unit; empty for none."""
    if not num_bytes:
        return ""
    power = min((int(num_bytes).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power]}"
