# SPDX-License-Identifier: Apache-2.0
"""The command line of the patch series, for tools/apply_patches.py and ``python -m vllm_overlay.patching``."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_overlay.patching import tree
from vllm_overlay.patching.advice import command
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.installed import installed_root
from vllm_overlay.patching.replace import unwritable_directory
from vllm_overlay.patching.series import load
from vllm_overlay.versions import VLLM as VLLM_VERSION

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"Applies this overlay's patch series to vLLM {VLLM_VERSION}, all of it or nothing. Each file "
        "is replaced by a rename. After a run that was killed, run it again: every run starts from what it finds.",
        epilog=f"""examples:
  {program} --installed                     patch the vLLM of this environment
  {program} --installed --status            what is in it
  {program} --installed --reverse           back to vLLM's own files
  {program} --target ~/src/vllm             patch a checkout or an unpacked source
  {program} --target ~/src/vllm --check     say whether it would apply
  {program} --installed --declare vllm/v1/core/sched/scheduler.py
                                            take your own change behind the series

exit status:
  0    done; with --check: the series fits what is in the tree, or is applied; with --status: it is applied
  1    refused, nothing was changed; with --check: it would be refused; with --status: it is not applied
  2    wrong usage
  130  interrupted by Ctrl-C; the tree is as it was

--check and --status need no write permission. If this user could not write there, --check says so, and its exit status
is still that of the contents. A refusal names every file that hinders, and how to keep what was edited.
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--installed", action="store_true", help="the vLLM that this Python would import")
    where.add_argument("--target", type=Path, metavar="DIR", help="the directory that holds vllm/, or vllm/ itself")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say whether the series would apply; touch nothing")
    what.add_argument("--status", action="store_true", help="say what each touched file is; touch nothing")
    what.add_argument("--reverse", action="store_true", help="take the patches out again")
    what.add_argument(
        "--declare",
        nargs="+",
        metavar="FILE",
        help="files, as --status names them, in which a change of yours stands behind the series: from now on exactly "
        "these bytes are taken too, and any other are refused",
    )
    return parser


def main(argv: Sequence[str] | None = None, program: str = "tools/apply_patches.py") -> int:
    """Runs the command; returns its exit status."""
    arguments = _parser(program).parse_args(argv)
    try:
        return _run(arguments)
    except PatchError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush complains at its exit
        return REFUSED
    except OSError as error:
        print(f"refused: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted: the tree is as it was, unless --status says otherwise", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    root = _root(arguments)
    if arguments.check:
        return _check(root)
    if arguments.status:
        where = "--installed" if arguments.installed else f"--target {shlex.quote(str(root))}"
        return _status(root, f"`{command(where)}`")
    series = load()
    if arguments.declare:
        print(f"{root / 'vllm'}: {tree.declare(root, arguments.declare, series).description}")
        return DONE
    before = tree.status(root, series)
    if before.is_partial:
        print(f"{root / 'vllm'}: the series was applied only in part, this run repairs it")
    if arguments.reverse:
        tree.reverse(root, series)
        print(f"{root / 'vllm'}: {'as it was, no patch was in it' if before.is_original else 'vLLM is its own again'}")
    else:
        tree.apply(root, series)
        said = "has them already" if before.is_applied else "done"
        print(f"{root / 'vllm'}: {before.description}: {said}")
    return DONE


def _root(arguments: argparse.Namespace) -> Path:
    if not arguments.installed:
        return tree.find_root(arguments.target)
    root = installed_root()
    if root is None:
        raise PatchError(f"{sys.executable} finds no vLLM: install vLLM {VLLM_VERSION}, or use --target DIR")
    return root


def _status(root: Path, apply: str) -> int:
    found = tree.status(root)
    print(f"{root / 'vllm'}: vLLM {found.vllm_version or '(does not say its version)'}; {found.description}\n")
    width = max(map(len, found.files))
    print("\n".join(f"{path.ljust(width)}  {state}" for path, state in found.states.items()))
    if found.is_partial:
        print(f"\nThe series is applied only in part: run {apply} to complete it, with --reverse to take it out.")
    elif found.foreign:
        print("\nNot every file is vLLM's own or ours: --check says how to go on and to keep what was edited.")
    elif found.is_applied:
        print("\nThe series is applied.")
    else:
        print("\nThe series is not applied.")
    return DONE if found.is_applied else REFUSED


def _check(root: Path) -> int:
    series = load()
    found = tree.status(root, series)
    if refusal := tree.refusal(root, series):
        print(f"The series would be refused: {refusal}")
        return REFUSED
    unwritable = unwritable_directory(root, found.files)
    if found.is_applied:
        print(f"The series is applied: {found.description}.")
    elif unwritable:
        print(
            f"The series fits, but this user cannot write {unwritable}: apply it as the owner of {root}, or to a copy, "
            "with --target."
        )
    else:
        print("The series would apply.")
    return DONE
