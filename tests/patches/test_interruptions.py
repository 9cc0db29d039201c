# SPDX-License-Identifier: Apache-2.0
"""Runs that an exception or a kill ends at any step.

An exception leaves the tree as it was. A kill leaves whole files, old or new, and the next run, whichever it is, brings
all of them to one end and leaves nothing over.
"""

import os
from random import Random

import pytest

from tests.patches.trees import ORIGINALS, THREE_STEPS, A, B, C, contents, make_series
from vllm_overlay.patching import installed
from vllm_overlay.patching.advice import FileState
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.originals import STATE_DIRECTORY
from vllm_overlay.patching.series import sha256
from vllm_overlay.patching.tree import apply, reverse, status

STEPS = ("replace", "unlink", "fsync", "fchmod", "mkdir")
SOME_PATCHED = [A, C]
"""What the tests call half: the first and the last file are patched."""


def ends(series):
    """The contents of the package without and with the series, nothing else beside them."""
    originals = {path: text.encode() for path, text in ORIGINALS.items()}
    patched = {p: series.patched(p, o) if p in series.files else o for p, o in originals.items()}
    return {"vllm/__init__.py": b"", **originals}, {"vllm/__init__.py": b"", **patched}


def left_in_state_directory(tree):
    directory = tree / STATE_DIRECTORY
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def assert_nothing_is_left_over(tree, series, action, also=()):
    """The tree is at the end that this action leads to; ``also``: originals that another series has kept."""
    original, patched = ends(series)
    assert contents(tree) == (patched if action is apply else original)
    if action is reverse:
        assert not (tree / STATE_DIRECTORY).exists()
        return
    kept = {sha256(original[path]) for path in {*series.files, *also}}
    assert left_in_state_directory(tree) == sorted([*(f"originals/{digest}" for digest in kept), "originals.json"])
    for digest in kept:
        assert sha256((tree / STATE_DIRECTORY / "originals" / digest).read_bytes()) == digest


def make_half(tree, series):
    """What a killed run leaves: some files are patched."""
    apply(tree, series)
    for path in ORIGINALS:
        if path not in SOME_PATCHED:
            (tree / path).write_text(ORIGINALS[path])
    assert status(tree, series).is_partial


def start_from(tree, series, state):
    reverse(tree, series)
    if state == "applied":
        apply(tree, series)
    elif state == "half":
        make_half(tree, series)


def strike_at(step, names, strike, monkeypatch):
    """The n-th call of any of these functions strikes first; returns a function that tells whether it was made."""
    left = step

    def striking(real):
        def take(*arguments, **keywords):
            nonlocal left
            left -= 1
            if left == 0:
                strike()
            return real(*arguments, **keywords)

        return take

    for name in names:
        monkeypatch.setattr(os, name, striking(getattr(os, name)))
    return lambda: left <= 0


# Exceptions


def visible(files):
    """Without what tidying up would have removed."""
    return {path: content for path, content in files.items() if not path.endswith("-new")}


def run_with_an_error_at(step, error, action, tree, series, monkeypatch):
    """Runs an action of which the n-th step raises; returns whether there was one, and whether the run ended in it."""
    raised = False

    def strike():
        raise error

    with monkeypatch.context() as patched:
        was_taken = strike_at(step, STEPS, strike, patched)
        try:
            action(tree, series)
        except (KeyboardInterrupt, PatchError):
            raised = True
    return was_taken(), raised


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize(
    ("start", "action"), [("original", apply), ("applied", reverse), ("half", apply), ("half", reverse)]
)
def test_an_exception_at_any_step_leaves_the_tree_as_it_was(tree, series, monkeypatch, start, action, error):
    end = ends(series)[action is apply]
    start_from(tree, series, start)
    interrupted = 0
    for step in range(1, 200):
        before, state = contents(tree), status(tree, series)
        was_taken, raised = run_with_an_error_at(step, error, action, tree, series, monkeypatch)
        if not was_taken:
            break
        interrupted += raised
        if visible(contents(tree)) == end:  # it had ended but for its tidying up, or the step was one that may fail
            action(tree, series)
            assert_nothing_is_left_over(tree, series, action)
            start_from(tree, series, start)
        else:
            assert raised
            assert contents(tree) == before
            assert status(tree, series) == state
    assert interrupted >= (3 if start == "half" else 9)
    assert_nothing_is_left_over(tree, series, action)


def test_a_file_that_cannot_be_put_back_is_named_and_the_next_run_repairs_it(tree, series, monkeypatch):
    real, renamed = os.replace, []

    def broken(source, target, **keywords):
        if (tree / C).name in str(target):
            raise OSError(5, "Input/output error")
        if A in renamed and A in str(target):
            raise OSError(30, "Read-only file system")
        renamed.extend(path for path in (A, B) if path in str(target))
        real(source, target, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", broken)
        with pytest.raises(PatchError, match=r"a\.py could not be put back \(Read-only file system\).*only in part"):
            apply(tree, series)
    assert status(tree, series).is_partial
    reverse(tree, series)
    assert_nothing_is_left_over(tree, series, reverse)


# Kills


def killed_at(step, action, tree, series):
    """Runs an action in a process that is killed at its n-th step; returns whether it was."""
    child = os.fork()
    if child == 0:
        strike_at(step, (*STEPS, "open", "rmdir"), lambda: os.kill(os.getpid(), 9), pytest.MonkeyPatch())
        status = 1
        try:
            action(tree, series)
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -9)
    return status == -9


def assert_it_is_told(tree, series, known=(FileState.ORIGINAL, FileState.PATCHED)):
    """Every file is whole and known, and the check at start says so of a tree that is neither one nor the other."""
    found = status(tree, series)
    assert set(found.states.values()) <= set(known), found.states
    problem = installed._problem(found, found.vllm_version)
    assert bool(problem) is not found.is_applied
    assert found.is_applied or "apply_patches.py --installed`" in problem
    is_mixed = len(set(found.states.values())) > 1
    assert is_mixed is found.is_partial is ("only in part" in problem)
    return is_mixed


@pytest.mark.parametrize("then", [apply, reverse])
@pytest.mark.parametrize(("start", "action"), [("original", apply), ("applied", reverse)])
def test_a_run_killed_at_any_step_is_repaired_by_the_next(tree, series, start, action, then):
    half_seen = 0
    for step in range(1, 200):
        start_from(tree, series, start)
        if not killed_at(step, action, tree, series):
            break
        half_seen += assert_it_is_told(tree, series)
        then(tree, series)
        assert_nothing_is_left_over(tree, series, then)
    assert step > 15
    assert half_seen >= 2


@pytest.mark.patches
def test_runs_killed_one_after_the_other_lose_nothing(tree, series):
    kills = half_seen = 0
    random = Random(10)
    for _ in range(60):
        kills += killed_at(random.randrange(8, 38), random.choice([apply, reverse]), tree, series)
        half_seen += assert_it_is_told(tree, series)
    assert kills > 20 and half_seen >= 2
    apply(tree, series)
    assert_nothing_is_left_over(tree, series, apply)


@pytest.mark.patches
@pytest.mark.parametrize("then", [apply, reverse])
def test_a_change_of_series_killed_at_any_step_is_repaired_by_the_next_run(tree, tmp_path, then):
    old = make_series(tmp_path / "old", THREE_STEPS)
    steps = {"0001-other.patch": {B: ("b = 1\n", "b = 'one'\n")}, "0002-more.patch": {A: ("a = 1\n", "a = 'one'\n")}}
    new = make_series(tmp_path / "new", steps)
    mixed_seen = 0
    for step in range(1, 200):
        apply(tree, old)
        if not killed_at(step, apply, tree, new):
            break
        mixed_seen += assert_it_is_told(tree, new, (FileState.EARLIER, FileState.PATCHED))
        then(tree, new)
        assert_nothing_is_left_over(tree, new, then, also=old.files)
    assert step > 15
    assert mixed_seen >= 1


def killed_when(path, tree, series):
    """A tree on which ``apply`` was killed right after it replaced ``path``."""
    for step in range(1, 200):
        assert killed_at(step, apply, tree, series)
        if status(tree, series).states[path] is FileState.PATCHED:
            return
        reverse(tree, series)


def test_a_file_that_was_written_since_a_kill_is_refused_and_kept(tree, series):
    killed_when(A, tree, series)
    (tree / A).write_text("mine\n")
    for action in apply, reverse:
        with pytest.raises(PatchError, match=r"edited  vllm/a\.py"):
            action(tree, series)
    assert (tree / A).read_text() == "mine\n"
    (tree / A).write_text(ORIGINALS[A])
    reverse(tree, series)
    assert_nothing_is_left_over(tree, series, reverse)
