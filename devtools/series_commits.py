# SPDX-License-Identifier: Apache-2.0
"""For maintainers: the patch series as commits of a git repository, tried on another vLLM, and back; see --help."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from devtools.upstream_tests import link
from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import PatchError, parse
from vllm_overlay.patching.series import load, read_patch, sha256
from vllm_overlay.versions import VLLM as VLLM_VERSION

ORIGINAL_TAG, NEW_TAG, BRANCH = "original", "new", "series"
_AUTHOR = ("-c", "user.name=series", "-c", "user.email=series@localhost", "-c", "core.autocrlf=false")


def git(directory: Path, *arguments: str, text: str | None = None) -> str:
    command = ["git", "-C", str(directory), *_AUTHOR, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, input=text)
    if done.returncode:
        raise PatchError(f"git {' '.join(arguments)} failed:\n{(done.stdout + done.stderr).strip()}")
    return done.stdout


def fields_of(patch: bytes) -> dict[str, str]:
    """The header's fields, as DEP-3 has them: ``Field: value``, and lines that begin with a blank go on."""
    header = patch.partition(b"\ndiff --git ")[0].decode()
    return dict(re.findall(r"^([A-Z][A-Za-z-]*):[ \t]*(.*(?:\n[ \t].*)*)", header, re.MULTILINE))


def _copy(source: str, destination: str) -> None:
    """Compiled modules are linked: they are large and nobody edits them."""
    (link if source.endswith(".so") else shutil.copy2)(source, destination)


def open_series(source: Path, directory: Path, patches: Path | None = None) -> list[str]:
    """Makes ``directory`` a repository with vLLM's own files and one commit a patch. Returns the patches' names.

    ``source`` may be patched: vLLM's own files are taken from what was kept.
    """
    if directory.exists():
        raise PatchError(f"{directory} exists: name a directory that does not")
    root, series = tree.find_root(source), load(patches)
    own = tree.originals(root, series)
    shutil.copytree(
        root / "vllm", directory / "vllm", copy_function=_copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    for path, content in own.items():
        (directory / path).write_bytes(content)
    git(directory, "init", "--quiet", "--initial-branch", BRANCH)
    git(directory, "config", "commit.cleanup", "verbatim")
    (directory / ".git/info/exclude").write_text("*.so\n__pycache__/\n")
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", f"vLLM {VLLM_VERSION}")
    git(directory, "tag", ORIGINAL_TAG)
    for name in series.patches:
        text = read_patch(series.directory / name)
        for diff in parse(text, name):
            path = directory / diff.path
            path.write_bytes(diff.apply(path.read_bytes()))
        header = text.decode().partition("\ndiff --git ")[0].strip()
        git(directory, "commit", "--quiet", "--all", "--file", "-", text=f"{name}\n\n{header}\n")
    return list(series.patches)


def check_series(directory: Path, source: Path) -> dict[str, str]:
    """What each patch would do on another vLLM, each after those before it. The tag ``new`` is that vLLM's files."""
    root = tree.find_root(source)
    git(directory, "checkout", "--quiet", "--detach", ORIGINAL_TAG)
    git(directory, "rm", "-r", "--quiet", "vllm")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(root / "vllm", directory / "vllm", ignore=ignored, dirs_exist_ok=True)
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--allow-empty", "--message", f"vLLM {tree.version_of(root) or root}")
    git(directory, "tag", "--force", NEW_TAG)
    try:
        commits = git(directory, "rev-list", "--reverse", f"{ORIGINAL_TAG}..{BRANCH}").split()
        return {_message(directory, commit)[0]: _try(directory, commit) for commit in commits}
    finally:
        git(directory, "checkout", "--quiet", "--force", BRANCH)


def _try(directory: Path, commit: str) -> str:
    diff = git(directory, "diff", "--full-index", f"{commit}~", commit)
    sign = fields_of(_message(directory, commit)[1].encode()).get("Drop-Sign", "")
    path, _, text = sign.partition(": ")
    if path.startswith("vllm/") and (directory / path).is_file() and text in (directory / path).read_text():
        return f"no longer needed: {sign}"
    try:
        git(directory, "apply", "--reverse", "--check", text=diff)
        return "already there"
    except PatchError:
        pass
    try:
        git(directory, "apply", "--3way", "--index", text=diff)
    except PatchError as error:
        git(directory, "reset", "--quiet", "--hard")
        files = re.findall(r"(?m)^U (.+)$|^error: (vllm/\S+): does not exist", str(error))
        return "conflicts: " + ", ".join("".join(found) for found in files)
    git(directory, "commit", "--quiet", "--message", commit)
    return "applies"


def write_series(directory: Path, patches: Path | None = None) -> list[str]:
    """Writes patches/ from the commits of ``directory``, with the checksums. Returns the patches' names.

    Raises PatchError, and writes nothing, when a commit is none of a patch.
    """
    texts: dict[str, str] = {}
    for commit in git(directory, "rev-list", "--reverse", f"{ORIGINAL_TAG}..{BRANCH}").split():
        name, header = _message(directory, commit)
        if not re.fullmatch(r"\d{4}(-[a-z0-9]+)+\.patch", name) or name in texts:
            raise PatchError(
                f"commit {commit[:10]} {name!r}: its first line must be the name of one patch, such as "
                f"0017-do-this.patch; fold a `fixup!` in with `git rebase --interactive --autosquash {ORIGINAL_TAG}`"
            )
        diff = git(directory, "diff", "--no-color", "--no-ext-diff", "--abbrev=7", f"{commit}~", commit)
        texts[name] = f"{header.strip()}\n\n{diff}"
    target = patches or load().directory
    comments = [line for line in (target / "series").read_text().splitlines() if line.startswith("#")]
    for path in target.glob("*.patch"):
        path.unlink()
    for name, text in texts.items():
        (target / name).write_text(text, encoding="utf-8")
    (target / "series").write_text("\n".join([*comments, *texts]) + "\n", encoding="utf-8")
    paths = git(directory, "diff", "--name-only", ORIGINAL_TAG, BRANCH).split()
    own, patched = ({path: _content(directory, tag, path) for path in paths} for tag in (ORIGINAL_TAG, BRANCH))
    files = {path: {"original": sha256(own[path]), "patched": sha256(patched[path])} for path in paths}
    (target / "checksums.json").write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
    series = load(target)
    for path in paths:
        series.patched(path, own[path])
    return list(texts)


def _message(directory: Path, commit: str) -> tuple[str, str]:
    name, _, header = git(directory, "show", "-s", "--format=%B", commit).partition("\n")
    return name, header


def _content(directory: Path, tag: str, path: str) -> bytes:
    return subprocess.run(["git", "-C", directory, "show", f"{tag}:{path}"], capture_output=True, check=True).stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="The patch series as commits. `open` makes a git repository: vLLM's own files (tag "
        f"`{ORIGINAL_TAG}`), then one commit a patch, with the header as its message. Change commits there with git; "
        "`write` makes patches/ and its checksums from them. `check` says what each patch would do on another vLLM, "
        f"whose files it leaves in the tag `{NEW_TAG}`.",
        epilog="docs/patches.md has the steps. exit status: 0 done, 1 refused, 2 wrong usage",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    opening = commands.add_parser("open", help="make the repository")
    opening.add_argument("source", type=Path, help="a vLLM of the pinned version, patched or not")
    checking = commands.add_parser("check", help="say what each patch would do on another vLLM")
    writing = commands.add_parser("write", help="make patches/ from the repository")
    for each in (opening, checking, writing):
        each.add_argument("directory", type=Path, help="the repository")
    checking.add_argument("source", type=Path, help="a checkout or unpacked source of that vLLM")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "check":
            for name, outcome in check_series(arguments.directory, arguments.source).items():
                print(f"{name}  {outcome}")
        elif arguments.command == "open":
            print(f"{len(open_series(arguments.source, arguments.directory))} patches in {arguments.directory}")
        else:
            print(f"{len(write_series(arguments.directory))} patches written, series {load().id}")
    except PatchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
