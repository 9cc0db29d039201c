# SPDX-License-Identifier: Apache-2.0
"""Small trees and series to patch, and copies of the installed vLLM."""

import difflib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_overlay import VLLM_VERSION
from vllm_overlay.patching import tree
from vllm_overlay.patching.installed import installed_root
from vllm_overlay.patching.replace import replace_files
from vllm_overlay.patching.series import Series, load, sha256

HEADER = """\
Description: a change for the tests
 Symptom: none
Why-Patch: it is a test
Origin: own work
Forwarded: not-needed
Last-Update: 2026-01-31
Drop-When: never
Drop-Sign: none: it is a test

"""

A, B, C = "vllm/a.py", "vllm/sub/b.py", "vllm/sub/c.py"
ORIGINALS = {
    A: "".join(f"a = {n}\n" for n in range(40)),
    B: "".join(f"b = {n}\n" for n in range(40)),
    C: "c = 1\nc = 2\nc = 3\n",
}


def make_tree(root: Path, version: str | None = VLLM_VERSION, files: Mapping[str, str] = ORIGINALS) -> Path:
    """A source tree with a package vllm; ``version`` goes into its PKG-INFO."""
    for path, text in {"vllm/__init__.py": "", **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    if version is not None:
        (root / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")
    return root


def diff_of(path: str, old: str, new: str) -> str:
    """A git-style diff of one file."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}")
    return "".join([f"diff --git a/{path} b/{path}\n", *lines])


MINE = "# mine\n"
"""What somebody writes behind a file that the series changes."""


def edit(tree: Path, *paths: str) -> None:
    for path in paths:
        (tree / path).write_text((tree / path).read_text() + MINE)


def commands_in(said: str, containing: str = "") -> list[str]:
    """The lines of advice that are commands, without what is said of them."""
    return [line.strip() for line in said.splitlines() if line.startswith("    ") and containing in line]


def run_command(line: str, directory: Path | None = None) -> str:
    """A line of advice, by this Python and with no git settings of this machine; returns what it prints."""
    line = line.replace("git ", "git -c user.name=me -c user.email=me@example.org -c commit.gpgsign=false ")
    if line.startswith("python "):
        line = line.replace("python", shlex.quote(sys.executable), 1)
    done = subprocess.run(["sh", "-ec", line], capture_output=True, text=True, cwd=directory)
    assert done.returncode == 0, done
    return done.stdout


def write_series(directory: Path, patches: Mapping[str, str]) -> Path:
    """patches/ with everything but the checksums."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vllm_version.txt").write_text(f"{VLLM_VERSION}\n")
    (directory / "series").write_text("# a comment\n" + "".join(f"{name}\n" for name in patches))
    for name, text in patches.items():
        (directory / name).write_text(text)
    return directory


def make_series(directory: Path, steps: Mapping[str, Mapping[str, tuple[str, str]]]) -> Series:
    """A series whose patches each replace (old, new) in files of a tree as ``make_tree`` makes it."""
    now = dict(ORIGINALS)
    patches = {}
    for name, changes in steps.items():
        text = HEADER
        for path, (old, new) in changes.items():
            assert old in now[path]
            fresh = now[path].replace(old, new, 1)
            text += diff_of(path, now[path], fresh)
            now[path] = fresh
        patches[name] = text
    write_series(directory, patches)
    touched = {path for changes in steps.values() for path in changes}
    sums = {p: {"original": sha256(ORIGINALS[p].encode()), "patched": sha256(now[p].encode())} for p in sorted(touched)}
    (directory / "checksums.json").write_text(json.dumps({"files": sums}))
    return load(directory)


THREE_STEPS = {
    "0001-first.patch": {A: ("a = 5\n", "a = 'five'\na = 'and a line'\n"), B: ("b = 7\n", "b = 'seven'\n")},
    "0002-second.patch": {B: ("b = 30\n", "")},
    "0003-third.patch": {A: ("a = 20\n", "a = 'twenty'\n"), C: ("c = 3", "c = 'three'")},
}


def contents(root: Path) -> dict[str, bytes]:
    """Every file of the package, without bytecode."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / "vllm").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def installed_originals() -> dict[str, bytes]:
    """vLLM's own contents of the touched files, from the installed vLLM, patched or not."""
    root = installed_root()
    assert root is not None
    return tree.originals(root)


def make_unpatched(root: Path) -> Path:
    """A tree with vLLM's own touched files and no others."""
    return make_tree(root, files={path: content.decode() for path, content in installed_originals().items()})


def _link(source: str, destination: str) -> str:
    try:
        os.link(source, destination)
    except OSError:  # another file system
        shutil.copy2(source, destination)
    return destination


def linked_vllm(destination: Path) -> Path:
    """A hard-linked copy of the installed vLLM. Returns the directory that holds vllm/.

    ``replace_files`` then writes anew what differs and removes its bytecode.
    """
    root = installed_root()
    assert root is not None
    shutil.copytree(root / "vllm", destination / "vllm", copy_function=_link)
    return destination


def linked_originals(destination: Path) -> Path:
    """A copy of the installed vLLM without any of this series."""
    root = linked_vllm(destination)
    replace_files(root, installed_originals())
    return root


BUILDS_ON = {
    "0004-stop-loading-after-three-failures.patch": "0003-",
    "0005-recover-from-failed-synchronous-loads.patch": "0003-",
    "0006-recover-from-block-errors-with-several-groups.patch": "0003- 0005-",
    "0017-copy-partial-hits-of-unfinished-blocks-later.patch": "0003- 0005-",
}
"""Patches that apply without another and do not work without it."""


def linked_vllm_without(left_out: str, destination: Path) -> Path:
    """A copy of the installed vLLM with the series of this repository, but for one patch and what builds on it.

    git applies the others, because their hunks are not at their lines then.
    """
    series = load()
    root = linked_originals(destination)
    for name in series.patches:
        if name != left_out and left_out[:5] not in BUILDS_ON.get(name, "").split():
            subprocess.run(["git", "apply", series.directory / name], cwd=root, stderr=subprocess.DEVNULL)
    return root
