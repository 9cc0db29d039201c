# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay serve``: plans, says what to mind, and becomes vLLM's server with the tiers that were asked for."""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from vllm_overlay.cli.command import SOUND, Command
from vllm_overlay.cli.console import shown, size
from vllm_overlay.cli.tier_flags import add_tier_flags, children_of, server_arguments
from vllm_overlay.config import ConfigError
from vllm_overlay.patching import installed
from vllm_overlay.planning.capacity import Conversation
from vllm_overlay.planning.plan import Plan, make_plan
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import open_root

_PLUGIN = "vllm_overlay"
_PLUGINS = "VLLM_PLUGINS"
_CONVERSATION = Conversation(8000)
"""A tier that does not hold one of these is warned of."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_tier_flags(parser, "[--dry-run]")
    parser.epilog = """\
Every other flag goes to vLLM's server, which `vllm serve --help=all` lists. The match unit, the shutdown timeout and
--kv-transfer-config are set to what this model wants; a match unit or a timeout of yours stays.

examples:
  vllm-overlay serve /models/Qwen3.5-35B-A3B --cpu 32GiB --disk /var/cache/vllm-kv:1TiB --port 8000
  vllm-overlay serve MODEL --cpu 32GiB --dry-run > kv.json     for a chart: --kv-transfer-config "$(cat kv.json)"
"""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: the JSON of --kv-transfer-config on standard output, the rest on standard error",
    )


def _run(arguments: argparse.Namespace) -> int:
    with _ended_by_sigterm():
        plan = _plan(arguments)
    print(_shell_line(plan), file=sys.stderr)
    if arguments.dry_run:
        print(json.dumps(plan.kv_transfer_config, indent=2))
        return SOUND
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(plan.command[0], plan.command)


def _plan(arguments: argparse.Namespace) -> Plan:
    """Says what it finds. Raises ConfigError for what a start would refuse."""
    children = children_of(arguments)
    _require_plugin()
    _say("asking vLLM how it will cut this model's KV cache, a quarter to half a minute")
    plan = make_plan(server_arguments(arguments), children, _CONVERSATION, may_fetch=True)
    for item in plan.advice:
        if item.ends_a_start and not arguments.dry_run:
            raise ConfigError(f"{item.setting}: {item.sentence}")
        _say(f"{item.severity.value}: {item.setting}: {item.sentence}")
    for tier in plan.tiers:
        _say(
            f"{tier.name}: {size(tier.capacity_bytes)}, room for {tier.num_tokens:,} tokens, restored at multiples of "
            f"{tier.restore_unit_tokens}"
        )
    if not arguments.dry_run:
        _open_roots(children)
    return plan


def _open_roots(children: Sequence[Mapping[str, Any]]) -> None:
    """As the server will, after minutes of weights. Raises ConfigError."""
    for child in children:
        if "root" in child:
            try:
                open_root(Device(), child["root"])
            except ConfigError as error:
                raise ConfigError(f"--disk: {error}") from error


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """The first process of a container has no default for it. The process that is asked ends with this one."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _require_plugin() -> None:
    """Raises ConfigError where the server could not find our connectors; mends what ``VLLM_PLUGINS`` leaves out."""
    try:
        installed.require()
    except installed.UnpatchedError as error:
        raise ConfigError(str(error)) from error
    if not entry_points(group="vllm.general_plugins", name=_PLUGIN):
        raise ConfigError(
            f"vLLM would not find our connectors: install this package with `{sys.executable} -m pip install .`"
        )
    if (allowed := os.environ.get(_PLUGINS)) is not None and _PLUGIN not in allowed.split(","):
        os.environ[_PLUGINS] = ",".join([*filter(None, [allowed]), _PLUGIN])


def _say(sentence: str) -> None:
    print(f"vllm-overlay: {shown(sentence)}", file=sys.stderr, flush=True)


def _shell_line(plan: Plan) -> str:
    line = shlex.join(plan.command)
    return f"{_PLUGINS}={shlex.quote(os.environ[_PLUGINS])} {line}" if _PLUGINS in os.environ else line


SERVE = Command(
    name="serve",
    summary="start vLLM's server with a CPU tier, a disk tier or both",
    description="Plans a server's tiers, says what to mind, prints the command of vLLM's server, and becomes it.",
    examples={"serve MODEL --cpu 32GiB --disk /mnt/kv:1TiB": "vLLM's server with two tiers; it takes vLLM's flags too"},
    statuses={},
    add_arguments=_add_arguments,
    run=_run,
    passes_on=True,
)
