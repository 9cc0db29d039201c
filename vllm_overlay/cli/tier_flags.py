# SPDX-License-Identifier: Apache-2.0
"""``--cpu SIZE`` and ``--disk PATH:SIZE``, and the model: what ``serve`` and ``plan`` take beside vLLM's own flags."""

import argparse
from collections.abc import Sequence
from typing import Any

from vllm_overlay.config import ConfigError, parse_bytes
from vllm_overlay.settings.paths import parse_path

_ROOT = "/var/cache/vllm-kv"


def add_tier_flags(parser: argparse.ArgumentParser, usage: str) -> None:
    """``usage``: what the command takes beside them."""
    parser.usage = f"%(prog)s MODEL [--cpu SIZE] [--disk PATH[:SIZE]] {usage} [flags of vLLM's server]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    tiers = parser.add_argument_group("tiers, at least one")
    tiers.add_argument(
        "--cpu", metavar="SIZE", action="append", help="a CPU tier: host memory of all ranks, such as 32GiB"
    )
    tiers.add_argument(
        "--disk",
        metavar="PATH[:SIZE]",
        action="append",
        help=f"a disk tier: a directory that is its alone, and its limit (default 20GiB), such as {_ROOT}:1TiB",
    )


def children_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The ``kv_connector_extra_config`` of each tier, the CPU's first. Raises ConfigError that names the flag."""
    children: list[dict[str, Any]] = []
    if (cpu := _once(arguments.cpu, "--cpu")) is not None:
        parse_bytes(cpu, "--cpu")
        children.append({"tier": "cpu", "capacity_bytes": cpu})
    if (disk := _once(arguments.disk, "--disk")) is not None:
        children.append({"tier": "disk", **_disk(disk)})
    if not children:
        raise ConfigError(f"there is no tier: give --cpu 32GiB, --disk {_ROOT}:1TiB or both")
    return children


def _once(given: Sequence[str] | None, flag: str) -> str | None:
    if given and len(given) > 1:
        raise ConfigError(f"{flag} is there {len(given)} times: {' and '.join(given)}. Give it once")
    return given[0] if given else None


def _disk(given: str) -> dict[str, str]:
    path, colon, size = given.rpartition(":")
    if not colon:
        return {"root": _path(given, given)}
    if not path:
        raise ConfigError(f"--disk={given!r} has no path: write it before the size, such as {_ROOT}{given}")
    try:
        parse_bytes(size, "--disk")
    except ConfigError as error:
        raise ConfigError(
            f"--disk={given!r}: what follows the last colon, {size!r}, is no size: write {path}:1TiB, or {given}:1TiB "
            "where the colon belongs to the path"
        ) from error
    return {"root": _path(path, given), "capacity_bytes": size}


def _path(path: str, given: str) -> str:
    try:
        parse_bytes(path, "--disk")
    except ConfigError:
        return parse_path(path, "--disk", _ROOT)
    raise ConfigError(f"--disk={given!r} has no path: write it before the size, such as {_ROOT}:{path}")


def server_arguments(arguments: argparse.Namespace) -> list[str]:
    """What vLLM's parser gets. Nobody reads it here but for the model, which may be the first word.

    ``vllm serve`` takes it so, and ``python -m vllm.entrypoints.openai.api_server`` as ``--model``.
    """
    given: list[str] = arguments.vllm
    return ["--model", *given] if given and not given[0].startswith("-") else given
