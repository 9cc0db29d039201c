# SPDX-License-Identifier: Apache-2.0
"""The command line: the list of commands, the parser that they make, and what a failure prints and returns."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from vllm_overlay import __version__
from vllm_overlay.cli.command import INTERRUPTED, PROBLEMS, SOUND, USAGE, Command
from vllm_overlay.cli.console import shown
from vllm_overlay.cli.plan import PLAN
from vllm_overlay.cli.probe import PROBE
from vllm_overlay.cli.serve import SERVE
from vllm_overlay.cli.stats import STATS
from vllm_overlay.cli.verify import VERIFY
from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import GeometryError
from vllm_overlay.server.api_client import ApiError
from vllm_overlay.verification.answers import NothingToVerify

FAILURES = (OSError, ConfigError, GeometryError, ApiError, NothingToVerify)
"""What a command raises for wrong usage, in a sentence."""
COMMANDS: tuple[Command, ...] = (SERVE, VERIFY, PLAN, PROBE, STATS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. The script ``vllm-overlay`` calls it."""
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and not arguments.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.vllm = unknown
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except FAILURES as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        print(f"vllm-overlay: {shown(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nvllm-overlay: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-overlay",
        description="Plans and looks after a server's tiers. Commands on a disk root may run while others serve it.",
        epilog=f"""examples:
{_examples()}

exit status:
  0    {_meanings(SOUND)}
  1    {_meanings(PROBLEMS)}
  2    wrong usage; no root or server, or one that does not answer as it should; plan: it cannot work
  130  interrupted; what was done is whole
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=command.description, allow_abbrev=not command.passes_on
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, passes_on=command.passes_on)
    return parser


def _examples() -> str:
    examples = {typed: meaning for command in COMMANDS for typed, meaning in command.examples.items()}
    width = max(map(len, examples))
    return "\n".join(f"  vllm-overlay {typed:{width}}      {meaning}" for typed, meaning in examples.items())


def _meanings(status: int) -> str:
    return "; ".join(
        f"{command.name}: {command.statuses[status]}" for command in COMMANDS if status in command.statuses
    )
