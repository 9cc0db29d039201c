# SPDX-License-Identifier: Apache-2.0
"""Runs that an exception or a kill ends at any step: the tree is as it was, at once or after the next run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.trees import ORIGINALS, A, contents
from vllm_overlay.patching import tree as patch_tree
from vllm_overlay.patching.replace import STATE_DIRECTORY, lock, recover
from vllm_overlay.patching.tree import FileState, PatchError, apply, reverse, status

REPO = Path(__file__).resolve().parents[2]


def other_end(tree, series, action):
    """The contents that an action leads to; the tree is left as it is, inodes included."""
    originals = {path: series.original_of(path, (tree / path).read_bytes()) for path in series.chains}
    wanted = {p: series.patched_from(p, o) if action is apply else o for p, o in originals.items()}
    return {**contents(tree), **wanted}


def visible(files):
    """Without what tidying up would have removed."""
    return {path: content for path, content in files.items() if not path.endswith(("-new", "-old"))}


STEPS = ("replace", "link", "unlink", "fsync", "fchmod")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("action", [apply, reverse])
def test_an_exception_at_any_step_leaves_the_tree_as_it_was(tree, series, monkeypatch, action, error):
    undo = reverse if action is apply else apply
    if action is reverse:
        apply(tree, series)
    before = contents(tree)
    after = other_end(tree, series, action)
    inodes = {path: (tree / path).stat().st_ino for path in before}
    steps = interrupted = 0
    real = {name: getattr(os, name) for name in STEPS}

    def failing(name):
        def step(*arguments, **keywords):
            nonlocal steps
            steps += 1
            if steps == at:
                raise error
            return real[name](*arguments, **keywords)

        return step

    for at in range(1, 200):
        steps = 0
        with monkeypatch.context() as patched:
            for name in STEPS:
                patched.setattr(os, name, failing(name))
            try:
                action(tree, series)
            except (KeyboardInterrupt, PatchError):
                interrupted += 1
        if steps < at:
            break
        now = contents(tree)
        if visible(now) == after:  # it had ended but for its tidying up, or the step was one that may fail
            assert action(tree, series).is_applied is (action is apply)
            undo(tree, series)
            inodes = {path: (tree / path).stat().st_ino for path in before}
        else:
            assert now == before
            assert not status(tree, series).interrupted
        assert contents(tree) == before
        assert {path: (tree / path).stat().st_ino for path in before} == inodes
    assert interrupted > 10
    assert action(tree, series).is_applied is (action is apply)


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {repo!r})
from devtools.validate_patches import validate
from vllm_overlay.patching import tree as patch_tree
from vllm_overlay.patching import replace
from vllm_overlay.patching.series import load
action, directory, root, left = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
series = load(directory)
def stepping(real):
    def step(*arguments, **keywords):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return real(*arguments, **keywords)
    return step
for name in {steps!r}:
    setattr(os, name, stepping(getattr(os, name)))
if action == "recover":
    with replace.lock(root):
        replace.recover(root)
else:
    getattr(patch_tree, action)(root, series)
"""


def killed_at(step, action, tree, series):
    """Runs an action in a process that is killed at its n-th step; returns whether it was."""
    script = KILLED.format(repo=str(REPO), steps=STEPS)
    command = [sys.executable, "-c", script, action, str(series.directory), str(tree), str(step)]
    code = subprocess.run(command).returncode
    assert code in (0, -9)
    return code == -9


@pytest.mark.parametrize("action", ["apply", "reverse"])
def test_a_run_killed_at_any_step_is_rolled_back_by_the_next(tree, series, action):
    undo = reverse if action == "apply" else apply
    if action == "reverse":
        apply(tree, series)
    before = contents(tree)
    after = other_end(tree, series, getattr(patch_tree, action))
    half_seen = 0
    for step in range(1, 200):
        if not killed_at(step, action, tree, series):
            break
        found = status(tree, series)
        states = set(found.files.values())
        if len(states) > 1:
            half_seen += 1
            assert found.interrupted
            assert "only in part" in patch_tree.verify_installed(series, tree).problem
        with lock(tree):
            recover(tree)
        if contents(tree) == after:  # it had ended
            undo(tree, series)
        assert contents(tree) == before
    assert step > 20
    assert half_seen >= 2


def test_a_roll_back_that_is_killed_is_taken_up_again(tree, series):
    before = contents(tree)
    middle = next(
        step
        for step in range(1, 200)
        if killed_at(step, "apply", tree, series) and len(set(status(tree, series).files.values())) > 1
    )
    assert middle
    for step in range(1, 50):
        if not killed_at(step, "recover", tree, series):
            break
    assert step > 3
    assert contents(tree) == before
    assert status(tree, series).is_original


def test_a_journal_does_not_touch_a_file_that_was_written_since(tree, series):
    steps = (s for s in range(1, 200) if killed_at(s, "apply", tree, series))
    next(s for s in steps if status(tree, series).files[A] is FileState.PATCHED)
    (tree / A).write_text("reinstalled\n")
    with lock(tree):
        recover(tree)
    assert (tree / A).read_text() == "reinstalled\n"
    assert sorted(contents(tree)) == sorted(["vllm/__init__.py", *ORIGINALS])


def test_a_journal_that_names_a_file_outside_is_refused(tree, series, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tree / STATE_DIRECTORY).mkdir()
    entry = {"path": "vllm/../../victim", "before": "0", "after": "0"}
    (tree / STATE_DIRECTORY / "journal.json").write_text(json.dumps({"phase": "staged", "files": [entry]}))
    with pytest.raises(PatchError, match="journal"):
        apply(tree, series)
    assert (tmp_path / "victim").read_text() == "mine"
