# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats``: what lies under a disk root, whose it is and, with ``--verify``, whether it is right."""

import argparse
import contextlib
import json
import os
from dataclasses import asdict
from typing import Any

from vllm_overlay.cli.command import PROBLEMS, SOUND, Command
from vllm_overlay.cli.console import age, progress, shown, size
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import CatalogueError, NamespaceUsage
from vllm_overlay.tiers.disk.catalogue.generations import newest
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity, integrity_of
from vllm_overlay.tiers.disk.files.lease import host_elsewhere
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY
from vllm_overlay.tiers.disk.files.recognition import host_roots, require_root
from vllm_overlay.tiers.disk.recovery.inspection import Inspection, Inspector, description_of, kind_name, open_existing

_SHOWN = 1000


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
    if not os.path.isdir(arguments.root):
        raise ConfigError(f"{arguments.root!r} is no directory here: give the `root` of the disk tier's settings")
    require_root(arguments.root)
    if (owner := os.stat(arguments.root).st_uid) != os.geteuid():
        raise ConfigError(f"{arguments.root} belongs to user {owner}: run this as that user, `sudo -u '#{owner}' ...`")
    hosts = host_roots(arguments.root)
    roots = hosts if hosts and not newest(arguments.root) else [arguments.root]
    reports = [_look_at(root, integrity, arguments) for root in roots]
    if arguments.json:
        every = [report for report, _ in reports]
        print(json.dumps(every if len(every) > 1 else every[0], indent=2))
    is_seen = any("served_by" not in report for report, _ in reports)
    return SOUND if is_seen and all(is_sound for _, is_sound in reports) else PROBLEMS


def _look_at(root: str, integrity: Integrity, arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """A report on one root, or on one host's in it, and whether it is sound. Prints it unless it is to be JSON."""
    if host := host_elsewhere(root):  # SQLite would take what it is writing for what a killed process has left
        if not arguments.json:
            print(
                f"{shown(root)} is {shown(host)}'s, whose locks are not seen here: run this there (after a reboot once "
                "a server has started)"
            )
        return {"root": root, "served_by": host}, True
    found = None
    try:
        with contextlib.closing(open_existing(root)) as catalogue:
            usages, totals = catalogue.usage(), catalogue.totals()
            if arguments.verify:
                with progress("reading") as show:
                    found = Inspector(root, catalogue, integrity, arguments.remove, show).run()
    except CatalogueError as error:
        raise ConfigError(f"the catalogue of {root} cannot be asked: {error}") from error
    if not arguments.json:
        is_known = "" if totals.is_complete else ", as far as known: a server is reading what lies there"
        print(f"{size(totals.object_bytes)} in {len(usages)} namespaces under {shown(root)}{is_known}")
        for usage in usages:
            print("\n".join(_paragraph(usage, integrity.name)))
        if found is not None:
            print("\n".join(_findings(found, arguments.remove)))
    report = {"root": root, "num_bytes": totals.object_bytes, "namespaces": [_as_json(usage) for usage in usages]}
    is_sound = found is None or found.is_sound
    return report if found is None else report | {"verified": asdict(found)}, is_sound


def _as_json(usage: NamespaceUsage) -> dict[str, Any]:
    words = description_of(usage)
    return {
        "fingerprint": usage.fingerprint,
        "model": str(words.get("model", "")),
        "integrity": str(words.get(INTEGRITY, "")),
        "is_served": usage.is_served,
        "is_private": usage.is_private,
        "num_objects": usage.num_objects,
        "num_bytes": usage.num_bytes,
        "kinds": usage.kinds,
        "oldest_use": usage.oldest_use,
        "newest_use": usage.newest_use,
        "description": words,
    }


def _findings(found: Inspection, is_removing: bool) -> list[str]:
    lines = ["", f"{found.num_files} files of {size(found.num_bytes)} verify, {len(found.problems)} do not"]
    if found.num_missing:
        lines.append(f"  {found.num_missing} are gone: their prompts are computed again, and stored anew")
    for problem in found.problems[:_SHOWN]:
        mark = "removed" if problem.is_removed else "wrong" if problem.is_bad else "not read"
        lines.append(f"  {mark:8}  {problem.why:8}  {shown(problem.path)}")
    if len(found.problems) > _SHOWN:
        lines.append(f"  ... and {len(found.problems) - _SHOWN} more (--json has all)")
    if not is_removing and any(problem.is_bad for problem in found.problems):
        lines.append("--remove removes what is wrong; its prompts are computed again, and stored anew, then")
    for fingerprint, key in found.unverified.items():
        why = f"that needs --encryption-key-file with {shown(key)}" if key else "no server has said with what key yet"
        lines.append(f"{fingerprint[:16]}… was not verified: {why}")
    return lines


def _paragraph(usage: NamespaceUsage, own_integrity: str) -> list[str]:
    words = description_of(usage)
    model = f"model {shown(str(words['model']))}" if words.get("model") else "of a model that no server has named yet"
    served = "served now" if usage.is_served else "served by nobody"
    lines = ["", f"{usage.fingerprint[:16]}…  {model}, {served}{', since a reset' if usage.is_private else ''}"]
    if (integrity := str(words.get(INTEGRITY, ""))) not in ("", XXH3.name):
        lines.append(f"  encrypted with {'the given key' if integrity == own_integrity else shown(integrity)}")
    for kind, (objects, num_bytes) in usage.kinds.items():
        lines.append(f"  {objects} {kind_name(kind)}, {size(num_bytes)}")
    if usage.oldest_use is not None and usage.newest_use is not None:
        lines.append(f"  last used {age(usage.newest_use)} ago, what goes first {age(usage.oldest_use)} ago")
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
