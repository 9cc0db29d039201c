# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay gc``: make a disk root smaller by what no process serves, the oldest first."""

import argparse
import json
import os
from dataclasses import asdict

from vllm_overlay.cli.catalogue_errors import catalogue_errors_explained
from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import log_shown, progress, size
from vllm_overlay.cli.disk_root import add_root_arguments, require_owner
from vllm_overlay.config import parse_bytes
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.maintenance.gc import collect


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-bytes", required=True, metavar="N", help='what may stay; bytes or a size such as "50 GiB"'
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    add_root_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    max_bytes = parse_bytes(arguments.max_bytes, "--max-bytes")
    if not arguments.dry_run:
        require_owner(arguments.root)
    integrity = integrity_of(arguments.integrity_key_file, arguments.encryption_key_file)
    root = os.path.abspath(arguments.root)
    with log_shown(), catalogue_errors_explained(root):
        done = collect(root, max_bytes, arguments.dry_run, progress("removing"), integrity=integrity)
    is_kept = done.bytes_after <= max_bytes
    if arguments.json:
        print(json.dumps(asdict(done) | {"is_dry_run": arguments.dry_run}, indent=2))
        return SOUND if is_kept else PROBLEMS
    verb = "would remove" if arguments.dry_run else "removed"
    print(f"{verb} {done.removed_files} files of {size(done.removed_bytes)}; {size(done.bytes_after)} stay")
    if not is_kept:
        print(f"{size(done.in_use_bytes)} belong to namespaces that are served now: lower their capacity_bytes instead")
    return SOUND if is_kept else PROBLEMS


GC = Command(
    name="gc",
    summary="make a root smaller",
    description="Removes objects of namespaces that no process serves.",
    examples={'gc /var/cache/vllm-kv --max-bytes "50 GiB"': "make it smaller, what nobody serves and is oldest first"},
    statuses={SOUND: "the limit is kept", PROBLEMS: "what is being served is above the limit"},
    add_arguments=_add_arguments,
    run=_run,
)
