# SPDX-License-Identifier: Apache-2.0
"""For maintainers: is the patch series complete, and does it apply to vLLM's own source? See --help."""

import argparse
import datetime
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.replace import checked_target
from vllm_overlay.patching.series import Patch, Series, load, sha256
from vllm_overlay.patching.tree import find_root, version_of

REQUIRED_FIELDS = ("Description", "Why-Patch", "Origin", "Forwarded", "Last-Update", "Drop-When", "Drop-Sign")
_DROP_SIGN = re.compile(r"(vllm/\S+|none): \S")
_NAME = re.compile(r"\d{4}-[a-z0-9]+(-[a-z0-9]+)*\.patch")


def problems_of_series(series: Series) -> list[str]:
    """What is wrong with the files in patches/, as one line each."""
    names = [patch.name for patch in series.patches]
    problems = [f"{name}: not of the form 0001-what-it-does.patch" for name in names if not _NAME.fullmatch(name)]
    if names != sorted(names):
        problems.append("series: the patches are not in the order of their numbers")
    unlisted = {path.name for path in series.directory.glob("*.patch")} - set(names)
    problems += [f"{name}: not listed in series" for name in sorted(unlisted)]
    for patch in series.patches:
        problems += [f"{patch.name}: {problem}" for problem in problems_of_header(patch)]
    return problems


def problems_of_header(patch: Patch) -> list[str]:
    problems = [f"the header has no {name}" for name in REQUIRED_FIELDS if not patch.header.get(name, "").strip()]
    if "Symptom:" not in patch.header.get("Description", ""):
        problems.append("the Description does not say the `Symptom:`")
    try:
        datetime.date.fromisoformat(patch.header.get("Last-Update", ""))
    except ValueError:
        problems.append("Last-Update is not a date such as 2026-01-31")
    if not _DROP_SIGN.match(patch.header.get("Drop-Sign", "none: missing")):
        problems.append("Drop-Sign is not of the form `vllm/<file>: <text>` or `none: <why no text can be foreseen>`")
    return problems


def checksums_on(root: Path, series: Series) -> tuple[dict[str, object], list[str]]:
    """Applies the series to vLLM's own source, in memory: the checksums, and what went wrong."""
    problems: list[str] = []
    contents: dict[str, bytes] = {}
    files: dict[str, dict[str, object]] = {}
    for patch in series.patches:
        if patch.drop_sign:
            path, text = patch.drop_sign
            if text.encode() in checked_target(root, path).read_bytes():
                problems.append(f"{patch.name}: its Drop-Sign is in {path} of this vLLM: is the patch still needed?")
        for diff in patch.files:
            if diff.path not in contents:
                contents[diff.path] = checked_target(root, diff.path).read_bytes()
                files[diff.path] = {"original": sha256(contents[diff.path]), "after": {}}
            try:
                fresh, offsets = diff.locate(contents[diff.path])
            except PatchError as error:
                problems.append(f"{patch.name}: {error}")
                continue
            if any(offsets):
                problems.append(f"{patch.name}: {diff.path}: hunks are off by {offsets} lines: make the diff anew")
            if diff.reversed().apply(fresh) != contents[diff.path]:
                problems.append(f"{patch.name}: {diff.path}: taking it back does not give the original")
            if diff.path.endswith(".py"):
                try:
                    compile(fresh, diff.path, "exec", dont_inherit=True)
                except SyntaxError as error:
                    problems.append(f"{patch.name}: {diff.path} line {error.lineno}: {error.msg}")
            contents[diff.path] = fresh
            after = files[diff.path]["after"]
            assert isinstance(after, dict)
            after[patch.name] = sha256(fresh)
    return {"vllm_version": series.vllm_version, "series": series.id, "files": files}, problems


def validate(source: Path, *, update: bool, directory: Path | None = None) -> list[str]:
    """All problems; with ``update`` the checksums are written when there is no other one."""
    series = load(directory, checksums=False)
    root = find_root(source)
    version = version_of(root)
    if version is not None and version.partition("+")[0] != series.vllm_version:
        return [f"{root} is vLLM {version}, the pin in vllm_version.txt is {series.vllm_version}"]
    checksums, problems = checksums_on(root, series)
    problems = problems_of_series(series) + problems
    path = series.directory / "checksums.json"
    text = json.dumps(checksums, indent=2) + "\n"
    if update and not problems:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        problems.append("checksums.json is not of this series and this source: use --update")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Checks patches/: headers complete, every patch applies in order to vLLM's own source without "
        "moving by a line, checksums current.",
        epilog="examples:\n"
        "  devtools/validate_patches.py ~/src/vllm-0.32.0            check\n"
        "  devtools/validate_patches.py ~/src/vllm-0.32.0 --update   check, then write patches/checksums.json\n\n"
        "exit status: 0 all is well, 1 problems (one a line), 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="an unpatched checkout or unpacked source of the pinned vLLM")
    parser.add_argument("--update", action="store_true", help="write patches/checksums.json")
    arguments = parser.parse_args(argv)
    try:
        problems = validate(arguments.source, update=arguments.update)
    except PatchError as error:
        problems = [str(error)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(load().patches)} patches, series {load().id}: all is well")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
