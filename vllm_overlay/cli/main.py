# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-overlay`` command: look after a disk root. Needs neither torch nor vLLM."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from vllm_overlay import __version__
from vllm_overlay.config import GIB, KIB, MIB, TIB, ConfigError, parse_bytes
from vllm_overlay.tiers.disk.checksum import XXH3, integrity_of
from vllm_overlay.tiers.disk.fsck import Check, Finding
from vllm_overlay.tiers.disk.gc import collect
from vllm_overlay.tiers.disk.usage import NamespaceUsage, measure_usage, tag_name

SOUND, PROBLEMS, USAGE, INTERRUPTED = 0, 1, 2, 130
_TICK_S = 0.2
_SHOWN = 1000


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-overlay",
        description="Looks after the disk tier's files. May run while others serve the same root.",
        epilog="""examples:
  vllm-overlay stats /var/cache/vllm-kv                        what lies there, and whose it is
  vllm-overlay fsck /var/cache/vllm-kv                         verify every byte, change nothing
  vllm-overlay fsck /var/cache/vllm-kv --repair                remove what does not verify
  vllm-overlay gc /var/cache/vllm-kv --max-bytes "50 GiB"      make it smaller, what nobody serves and is oldest first

exit status:
  0    fsck: nothing is wrong, or all of it was repaired; gc: the limit is kept; stats: done
  1    fsck: something is wrong (still); gc: what is being served is above the limit
  2    wrong usage, or the root cannot be read
  130  interrupted; what was done is whole
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fsck = commands.add_parser("fsck", help="verify everything under a root", description="Verifies every file.")
    fsck.add_argument("--repair", action="store_true", help="remove what does not verify, set modes, count the ledger")
    stats = commands.add_parser("stats", help="what lies under a root", description="Opens no object.")
    gc = commands.add_parser(
        "gc", help="make a root smaller", description="Removes objects of namespaces that no process serves."
    )
    gc.add_argument("--max-bytes", required=True, metavar="N", help='what may stay; bytes or a size such as "50 GiB"')
    gc.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    for command, run in ((fsck, _fsck), (stats, _stats), (gc, _gc)):
        command.add_argument("root", metavar="ROOT", help="the `root` of the disk tier's settings")
        command.add_argument(
            "--integrity-key-file", default="", metavar="FILE", help="the `integrity_key_file` of the tier's settings"
        )
        command.add_argument("--json", action="store_true", help="one JSON object on standard output")
        command.set_defaults(run=run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except (OSError, ConfigError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        print(f"vllm-overlay: {shown(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nvllm-overlay: interrupted", file=sys.stderr)
        return INTERRUPTED


def shown(text: str) -> str:
    """``text`` without anything that could steer a terminal: names of files are anybody's."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def size(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def _age(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"


def _progress(verb: str) -> Callable[[int, int], None]:
    """A line on standard error that is written over, when that is a terminal; else nothing."""
    if not sys.stderr.isatty():
        return lambda done, total: None
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _TICK_S and done < total:
            return
        last = now
        part = min(1.0, done / total) if total else 1.0
        bar = "#" * round(part * 20)
        speed = size(int(done / max(now - started, 1e-3)))
        end = "\n" if done >= total else ""
        print(f"\r{verb} [{bar:<20}] {part:4.0%} of {size(total)}, {speed}/s\x1b[K", end=end, file=sys.stderr)

    return show


def _may_change(root: str) -> None:
    """Files that another user makes under a root would lock its owner out."""
    owner = os.stat(root).st_uid
    if owner != os.geteuid():
        raise ConfigError(f"{root} belongs to user {owner}: run this as that user")


def _fsck(arguments: argparse.Namespace) -> int:
    if arguments.repair:
        _may_change(arguments.root)
    integrity = integrity_of(arguments.integrity_key_file)
    report = Check(arguments.root, arguments.repair, _progress("reading"), integrity=integrity).run()
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


def _stats(arguments: argparse.Namespace) -> int:
    integrity = integrity_of(arguments.integrity_key_file)
    summaries = measure_usage(arguments.root)
    num_bytes = sum(summary.num_bytes for summary in summaries)
    if arguments.json:
        namespaces = [asdict(summary) for summary in summaries]
        print(json.dumps({"num_bytes": num_bytes, "namespaces": namespaces}, indent=2))
        return SOUND
    print(f"{size(num_bytes)} in {len(summaries)} namespaces under {shown(arguments.root)}")
    for summary in summaries:
        print("\n".join(_paragraph(summary, integrity.name)))
    return SOUND


def _paragraph(summary: NamespaceUsage, own_integrity: str) -> list[str]:
    model = f"model {shown(summary.model)}" if summary.model else "no namespace.json that says whose it is"
    lines = [
        "",
        f"{summary.fingerprint[:16]}…  {model}, {'served now' if summary.is_in_use else 'served by nobody'}",
    ]
    if summary.integrity not in ("", XXH3.name):
        whose = "the given key" if summary.integrity == own_integrity else shown(summary.integrity)
        lines.append(f"  checksums with {whose}")
    for kind, (objects, files, num_bytes) in summary.kinds.items():
        lines.append(f"  {objects} {tag_name(kind)} in {files} files, {size(num_bytes)}")
    if summary.oldest is not None and summary.newest is not None:
        lines.append(f"  oldest {_age(summary.oldest)} ago, newest {_age(summary.newest)} ago")
    if summary.temporary_bytes or summary.other_bytes:
        lines.append(f"  beside them {size(summary.temporary_bytes)} on their way, {size(summary.other_bytes)} unknown")
    lines += [f"  {size(num_bytes):>10}  {path[:16]}…{path[64:]}" for path, num_bytes in summary.largest]
    return lines


def _gc(arguments: argparse.Namespace) -> int:
    max_bytes = parse_bytes(arguments.max_bytes, "--max-bytes")
    if not arguments.dry_run:
        _may_change(arguments.root)
    os.listdir(arguments.root)
    integrity = integrity_of(arguments.integrity_key_file)
    done = collect(
        os.path.abspath(arguments.root), max_bytes, arguments.dry_run, _progress("removing"), integrity=integrity
    )
    is_kept = done.bytes_after <= max_bytes
    if arguments.json:
        print(json.dumps(asdict(done) | {"bytes_after": done.bytes_after, "is_dry_run": arguments.dry_run}, indent=2))
        return SOUND if is_kept else PROBLEMS
    verb = "would remove" if arguments.dry_run else "removed"
    print(f"{verb} {done.removed_files} files of {size(done.removed_bytes)}; {size(done.bytes_after)} stay")
    if not is_kept:
        print(f"{size(done.in_use_bytes)} belong to namespaces that are served now: lower their capacity_bytes instead")
    return SOUND if is_kept else PROBLEMS


if __name__ == "__main__":
    sys.exit(main())
