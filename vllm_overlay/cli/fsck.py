# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay fsck``: verify every file under a disk root, and remove what does not verify if asked to."""

import argparse
import json
from dataclasses import asdict

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import progress, shown, size
from vllm_overlay.cli.disk_root import add_root_arguments, require_owner
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.maintenance.findings import Finding
from vllm_overlay.tiers.disk.maintenance.fsck import Check

_SHOWN = 1000


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repair", action="store_true", help="remove what does not verify, set modes, put the catalogue right"
    )
    add_root_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.repair:
        require_owner(arguments.root)
    integrity = integrity_of(arguments.integrity_key_file, arguments.encryption_key_file)
    report = Check(arguments.root, arguments.repair, progress("reading"), integrity=integrity).run()
    left = sum(not finding.is_repaired for finding in report.problems)
    if arguments.json:
        print(json.dumps(asdict(report) | {"num_problems": len(report.problems), "num_problems_left": left}, indent=2))
    else:
        for finding in report.findings[:_SHOWN]:
            print(_line(finding))
        if len(report.findings) > _SHOWN:
            print(f"... and {len(report.findings) - _SHOWN} more (--json has all)")
        print(
            f"{report.num_objects} whole objects, {report.num_files} sound files of {size(report.num_bytes)} in "
            f"{report.num_namespaces} namespaces; {len(report.problems)} problems, "
            f"{len(report.problems) - left} repaired; {len(report.findings) - len(report.problems)} notes"
        )
        if left and not arguments.repair:
            print("--repair removes what does not verify: its prompts are computed again when they come")
    return SOUND if report.is_sound else PROBLEMS


def _line(finding: Finding) -> str:
    mark = "note" if not finding.is_problem else "repaired" if finding.is_repaired else "PROBLEM"
    return f"{mark:8}  {finding.what.value:11}  {shown(finding.path)}  {shown(finding.detail)}"


FSCK = Command(
    name="fsck",
    summary="verify everything under a root",
    description="Verifies every file.",
    examples={
        "fsck /var/cache/vllm-kv": "verify every byte, change nothing",
        "fsck /var/cache/vllm-kv --repair": "remove what does not verify, mend the catalogue",
    },
    statuses={SOUND: "nothing is wrong, or all of it was repaired", PROBLEMS: "something is wrong (still)"},
    add_arguments=_add_arguments,
    run=_run,
)
