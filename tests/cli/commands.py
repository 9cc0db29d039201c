# SPDX-License-Identifier: Apache-2.0
"""Running ``vllm-overlay``, in this process or in one that may not import vLLM, and reading what it said and left."""

import contextlib
import json
from pathlib import Path

from tests.tiers.disk.catalogue.inside import find
from tests.tiers.disk.tier_pair import NAMESPACE
from vllm_overlay import cli
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.files import writer

WITHOUT_VLLM = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm"):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Forbid())
from vllm_overlay.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Source of a process that runs the command and may import neither torch nor vLLM."""


def run(capsys, *arguments):
    """Exit status and the JSON that was printed."""
    capsys.readouterr()
    status = cli.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def refused(capsys, *arguments) -> str:
    """What a command of wrong usage says; it prints nothing else."""
    assert cli.main([*map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def path_of(root, planned, namespace=NAMESPACE):
    """Where the catalogue says that an object lies."""
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        (found,) = find(catalogue, namespace.fingerprint, [namespace.stored_id(planned.object_id)])
    return Path(writer.path_of(str(root), found.file, 0))


def contents(root):
    return {path: path.lstat() for path in sorted(root.rglob("*"))}


def remove_catalogue(root):
    for path in root.glob("catalogue*"):
        path.unlink()
