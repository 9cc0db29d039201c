# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats``: what lies under a disk root, and whose it is."""

import argparse
import json
from dataclasses import asdict

from vllm_overlay.cli.command import SOUND, Command
from vllm_overlay.cli.console import age, shown, size
from vllm_overlay.cli.disk_root import add_root_arguments
from vllm_overlay.tiers.disk.files.checksum import XXH3, integrity_of, is_encrypted
from vllm_overlay.tiers.disk.files.recognition import require_root
from vllm_overlay.tiers.disk.maintenance.usage import NamespaceUsage, measure_usage, tag_name

_SERVED = {True: "served now", False: "served by nobody", None: "unknown whether served: its catalogue cannot be asked"}


def _run(arguments: argparse.Namespace) -> int:
    integrity = integrity_of(arguments.integrity_key_file, arguments.encryption_key_file)
    require_root(arguments.root)
    usages = measure_usage(arguments.root)
    num_bytes = sum(usage.num_bytes for usage in usages)
    if arguments.json:
        namespaces = [asdict(usage) for usage in usages]
        print(json.dumps({"num_bytes": num_bytes, "namespaces": namespaces}, indent=2))
        return SOUND
    print(f"{size(num_bytes)} in {len(usages)} namespaces under {shown(arguments.root)}")
    for usage in usages:
        print("\n".join(_paragraph(usage, integrity.name)))
    return SOUND


def _paragraph(usage: NamespaceUsage, own_integrity: str) -> list[str]:
    model = f"model {shown(usage.model)}" if usage.model else "no namespace.json that says whose it is"
    lines = [
        "",
        f"{usage.fingerprint[:16]}…  {model}, {_SERVED[usage.is_in_use]}",
    ]
    if usage.integrity not in ("", XXH3.name):
        whose = "the given key" if usage.integrity == own_integrity else shown(usage.integrity)
        lines.append(f"  {'encrypted' if is_encrypted(usage.integrity) else 'checksums'} with {whose}")
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
    description="Opens no object.",
    examples={"stats /var/cache/vllm-kv": "what lies there, and whose it is"},
    statuses={SOUND: "done"},
    add_arguments=add_root_arguments,
    run=_run,
)
