# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats``: what lies under a disk root, whose it is and, with ``--verify``, whether it is right."""

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import age, progress, shown, size
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.checksum import XXH3, integrity_of
from vllm_overlay.tiers.disk.files.recognition import require_root
from vllm_overlay.tiers.disk.maintenance.inspection import Inspection, Inspector
from vllm_overlay.tiers.disk.maintenance.usage import NamespaceUsage, measure_usage, tag_name

_SHOWN = 1000
_SERVED = {True: "served now", False: "served by nobody", None: "unknown whether served: its catalogue cannot be asked"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="the `root` of the disk tier's settings")
    parser.add_argument("--verify", action="store_true", help="read every byte, as a load does, and say what is wrong")
    parser.add_argument("--remove", action="store_true", help="with --verify: remove the files that are wrong")
    parser.add_argument(
        "--encryption-key-file", default="", metavar="FILE", help="the `encryption_key_file` of the tier's settings"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.remove and not arguments.verify:
        raise ConfigError("--remove removes what --verify finds: give both")
    integrity = integrity_of(arguments.encryption_key_file)
    require_root(arguments.root)
    if arguments.remove and (owner := os.stat(arguments.root).st_uid) != os.geteuid():
        raise ConfigError(f"{arguments.root} belongs to user {owner}: run this as that user")
    usages = measure_usage(arguments.root)
    found = None
    if arguments.verify:
        with progress("reading") as show:
            found = Inspector(arguments.root, integrity, arguments.remove, show).run()
    num_bytes = sum(usage.num_bytes for usage in usages)
    if arguments.json:
        report: dict[str, Any] = {"num_bytes": num_bytes, "namespaces": [asdict(usage) for usage in usages]}
        print(json.dumps(report if found is None else report | {"verified": asdict(found)}, indent=2))
    else:
        print(f"{size(num_bytes)} in {len(usages)} namespaces under {shown(arguments.root)}")
        for usage in usages:
            print("\n".join(_paragraph(usage, integrity.name)))
        if found is not None:
            print("\n".join(_findings(found, arguments.remove)))
    return SOUND if found is None or found.is_sound else PROBLEMS


def _findings(found: Inspection, is_removing: bool) -> list[str]:
    lines = ["", f"{found.num_files} files of {size(found.num_bytes)} verify, {len(found.problems)} do not"]
    for problem in found.problems[:_SHOWN]:
        mark = "removed" if problem.is_removed else "wrong" if problem.is_bad else "not read"
        lines.append(f"  {mark:8}  {problem.why:8}  {shown(problem.path)}")
    if len(found.problems) > _SHOWN:
        lines.append(f"  ... and {len(found.problems) - _SHOWN} more (--json has all)")
    if not is_removing and any(problem.is_bad for problem in found.problems):
        lines.append("--remove removes what is wrong; so does the next load of it. Its prompts are computed again then")
    for fingerprint, key in found.unverified.items():
        why = f"that needs --encryption-key-file with {shown(key)}" if key else "no namespace.json says with what key"
        lines.append(f"{fingerprint[:16]}… was not verified: {why}")
    return lines


def _paragraph(usage: NamespaceUsage, own_integrity: str) -> list[str]:
    model = f"model {shown(usage.model)}" if usage.model else "no namespace.json that says whose it is"
    lines = [
        "",
        f"{usage.fingerprint[:16]}…  {model}, {_SERVED[usage.is_in_use]}",
    ]
    if usage.integrity not in ("", XXH3.name):
        whose = "the given key" if usage.integrity == own_integrity else shown(usage.integrity)
        lines.append(f"  encrypted with {whose}")
    for kind, (objects, files, num_bytes) in usage.kinds.items():
        lines.append(f"  {objects} {tag_name(kind)} in {files} files, {size(num_bytes)}")
    if usage.oldest is not None and usage.newest is not None:
        lines.append(f"  oldest file {age(usage.oldest)} ago, newest {age(usage.newest)} ago")
    if usage.oldest_use is not None and usage.newest_use is not None:
        lines.append(f"  last used {age(usage.newest_use)} ago, what goes first {age(usage.oldest_use)} ago")
    if usage.temporary_bytes or usage.other_bytes:
        lines.append(f"  beside them {size(usage.temporary_bytes)} on their way, {size(usage.other_bytes)} unknown")
    lines += [f"  {size(num_bytes):>10}  {path[:16]}…{path[64:]}" for path, num_bytes in usage.largest]
    return lines


STATS = Command(
    name="stats",
    summary="what lies under a root",
    description="Says what lies under a root, and whose it is. Opens no object without --verify.",
    examples={
        "stats /var/cache/vllm-kv": "what lies there, and whose it is",
        "stats /var/cache/vllm-kv --verify": "read every byte too, change nothing",
        "stats /var/cache/vllm-kv --verify --remove": "remove what is wrong",
    },
    statuses={SOUND: "nothing is wrong, or all of it was removed", PROBLEMS: "something is wrong (still)"},
    add_arguments=_add_arguments,
    run=_run,
)
