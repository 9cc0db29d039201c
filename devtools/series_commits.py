# SPDX-License-Identifier: Apache-2.0
"""For maintainers: the patch series as commits of a git repository, and back; see --help."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from devtools.validate_patches import validate
from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.series import load

ORIGINAL_TAG = "original"
_AUTHOR = ("-c", "user.name=series", "-c", "user.email=series@localhost")


def git(directory: Path, *arguments: str, text: str | None = None) -> str:
    """Runs git in ``directory``; raises PatchError with what it said."""
    command = ["git", "-C", str(directory), *_AUTHOR, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, input=text)
    if done.returncode:
        raise PatchError(f"git {' '.join(arguments)} failed:\n{(done.stdout + done.stderr).strip()}")
    return done.stdout


def _copy(source: str, destination: str) -> None:
    """Compiled modules are linked: they are large and nobody edits them."""
    if source.endswith(".so"):
        try:
            os.link(source, destination)
            return
        except OSError:  # another file system
            pass
    shutil.copy2(source, destination)


def open_series(source: Path, directory: Path, patches: Path | None = None) -> list[str]:
    """Makes ``directory`` a repository with vLLM's own files and one commit a patch. Returns the patches' names.

    ``source`` may be patched: the copy is taken back to vLLM's own files first.
    """
    if directory.exists():
        raise PatchError(f"{directory} exists: name a directory that does not")
    root = tree.find_root(source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "vllm", directory / "vllm", copy_function=_copy, ignore=ignored)
    if (kept := root / ".vllm-overlay").is_dir():
        shutil.copytree(kept, directory / kept.name)
    series = load(patches)
    tree.reverse(directory, series)
    git(directory, "init", "--quiet", "--initial-branch", "series")
    git(directory, "config", "commit.cleanup", "verbatim")
    (directory / ".git/info/exclude").write_text("*.so\n__pycache__/\n/.vllm-overlay/\n")
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", f"vLLM {series.vllm_version}")
    git(directory, "tag", ORIGINAL_TAG)
    for patch in series.patches:
        for diff in patch.files:
            path = directory / diff.path
            path.write_bytes(diff.apply(path.read_bytes()))
        header = (series.directory / patch.name).read_text(encoding="utf-8").partition("\ndiff --git ")[0]
        git(directory, "commit", "--quiet", "--all", "--file", "-", text=f"{patch.name}\n\n{header.strip()}\n")
    return [patch.name for patch in series.patches]


def write_series(directory: Path, patches: Path | None = None) -> list[str]:
    """Writes patches/ from the commits of ``directory``; nothing when a commit is none of a patch.

    Returns what the validator finds wrong with the result.
    """
    commits = git(directory, "rev-list", "--reverse", f"{ORIGINAL_TAG}..HEAD").split()
    texts: dict[str, str] = {}
    for commit in commits:
        name, _, header = git(directory, "show", "--no-patch", "--format=%B", commit).partition("\n")
        if not name.endswith(".patch") or " " in name or name in texts:
            raise PatchError(
                f"commit {commit[:10]} {name!r}: its first line must be the name of one patch, such as "
                "0017-do-this.patch; fold a `fixup!` in with `git rebase --interactive --autosquash original`"
            )
        texts[name] = f"{header.strip()}\n\n{_diff(directory, commit)}"
    target = patches or load(checksums=False).directory
    listed = (target / "series").read_text(encoding="utf-8").splitlines()
    comments = [line for line in listed if line.startswith("#")]
    for path in target.glob("*.patch"):
        path.unlink()
    for name, text in texts.items():
        (target / name).write_text(text, encoding="utf-8")
    (target / "series").write_text("\n".join([*comments, *texts]) + "\n", encoding="utf-8")
    return _validated(directory, target)


def _diff(directory: Path, commit: str) -> str:
    return git(directory, "diff", "--no-color", "--no-ext-diff", "--abbrev=7", f"{commit}~", commit)


def _validated(directory: Path, patches: Path) -> list[str]:
    """Validates on vLLM's own files, checked out beside the repository, and writes the checksums."""
    original = directory.with_name(f"{directory.name}.original")
    git(directory, "worktree", "add", "--quiet", "--force", "--detach", str(original), ORIGINAL_TAG)
    try:
        return validate(original, update=True, directory=patches)
    finally:
        git(directory, "worktree", "remove", "--force", str(original))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="The patch series as commits. `open` makes a git repository: vLLM's own files (tag "
        f"`{ORIGINAL_TAG}`), then one commit a patch, with the header as its message. Change commits there with git; "
        "`write` makes patches/ and its checksums from them.",
        epilog="examples:\n"
        "  devtools/series_commits.py open .venv/lib/python3.11/site-packages /tmp/series\n"
        "  cd /tmp/series; edit vllm/...; git commit -a --fixup :/0009-\n"
        f"  git rebase --interactive --autosquash {ORIGINAL_TAG}\n"
        "  devtools/series_commits.py write /tmp/series\n\n"
        "The repository holds the whole package: PYTHONPATH=/tmp/series runs it.\n"
        "exit status: 0 all is well, 1 problems (one a line), 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    opening = commands.add_parser("open", help="make the repository")
    opening.add_argument("source", type=Path, help="a vLLM of the pinned version, patched or not")
    opening.add_argument("directory", type=Path, help="the repository to make")
    writing = commands.add_parser("write", help="make patches/ from the repository")
    writing.add_argument("directory", type=Path, help="the repository")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "open":
            print(f"{len(open_series(arguments.source, arguments.directory))} patches in {arguments.directory}")
            return 0
        problems = write_series(arguments.directory)
    except PatchError as error:
        problems = [str(error)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(load().patches)} patches, series {load().id}: all is well")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
