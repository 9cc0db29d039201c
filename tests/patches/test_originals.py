# SPDX-License-Identifier: Apache-2.0
"""The kept originals: how a changed series finds the way back from what the one before has left."""

import json

import pytest

from tests.patches.trees import ORIGINALS, THREE_STEPS, A, B, C, contents, make_series
from vllm_overlay.patching import tree as patching_tree
from vllm_overlay.patching.advice import FileState
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.originals import STATE_DIRECTORY, Kept
from vllm_overlay.patching.series import Sums, sha256
from vllm_overlay.patching.tree import apply, reverse, status


def test_a_series_that_changed_finds_its_way_without_the_old_one(tree, tmp_path):
    before = contents(tree)
    old = make_series(tmp_path / "old", THREE_STEPS)
    new = make_series(tmp_path / "new", {"0001-other.patch": {B: ("b = 1\n", "b = 'one'\n")}})
    apply(tree, old)
    assert status(tree, new).states[B] is FileState.EARLIER
    assert apply(tree, new).is_applied
    after = contents(tree)
    assert after[A] == before[A] and after[C] == before[C]
    assert after[B] == before[B].replace(b"b = 1\n", b"b = 'one'\n")
    assert reverse(tree, new).is_original
    assert contents(tree) == before


@pytest.mark.parametrize("tampered", [{B}, {C}])
def test_a_kept_original_that_was_tampered_with_is_not_used(tree, tmp_path, tampered):
    """The new series touches b.py; c.py is only the old one's."""
    apply(tree, make_series(tmp_path / "old", THREE_STEPS))
    before = contents(tree)
    new = make_series(tmp_path / "new", {"0001-other.patch": {B: ("b = 1\n", "b = 'one'\n")}})
    for path in tampered:
        kept = tree / STATE_DIRECTORY / "originals" / sha256(ORIGINALS[path].encode())
        kept.write_bytes(b"evil\n")
        for action in apply, reverse:
            with pytest.raises(PatchError, match=f"original lost  {path}"):
                action(tree, new)
    assert contents(tree) == before


@pytest.mark.parametrize("action", [apply, reverse])
def test_an_original_of_another_vllm_is_not_used(tree, series, action):
    """The notes were made when the pin was another one."""
    other = b"of another version\n"
    Kept.read(tree).keep({A: Sums(sha256(other), sha256(b"patched\n"))}, {A: other})
    (tree / A).write_bytes(b"patched\n")
    with pytest.raises(PatchError, match=f"original lost  {A}"):
        action(tree, series)
    assert (tree / A).read_bytes() == b"patched\n"


@pytest.mark.parametrize("lost", [[A], [A, B, C]])
def test_a_tree_without_its_originals_is_not_reversed_until_they_are_there(tree, series, lost):
    before = contents(tree)
    apply(tree, series)
    for path in lost:
        (tree / STATE_DIRECTORY / "originals" / series.files[path].original).unlink()
    assert apply(tree, series).is_applied
    with pytest.raises(PatchError) as error:
        reverse(tree, series)
    assert all(f"original lost  {path}" in str(error.value) for path in lost)
    assert apply(tree, series).is_applied
    for path in lost:
        (tree / path).write_bytes(before[path])
    apply(tree, series)
    assert reverse(tree, series).is_original
    assert contents(tree) == before


def test_what_is_kept_is_written_before_the_first_file_is_replaced(tree, series, monkeypatch):
    kept = {}

    def seen(root, wanted):
        originals = Kept.read(root)
        kept.update({path: originals.find(path, series.files[path].patched) for path in wanted})

    before = contents(tree)
    monkeypatch.setattr(patching_tree, "replace_files", seen)
    apply(tree, series)
    assert kept == {path: before[path] for path in series.files}


@pytest.mark.parametrize("notes", ["", "[]", '{"vllm/a.py": 1}', "{"])
def test_damaged_notes_are_none(tree, series, notes):
    (tree / STATE_DIRECTORY).mkdir()
    (tree / STATE_DIRECTORY / "originals.json").write_text(notes)
    before = contents(tree)
    assert apply(tree, series).is_applied
    assert reverse(tree, series).is_original
    assert contents(tree) == before


def test_notes_that_name_a_file_outside_are_not_followed(tree, series, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tree / STATE_DIRECTORY).mkdir()
    notes = {"vllm/../../victim": {sha256(b"mine"): sha256(b"evil")}}
    (tree / STATE_DIRECTORY / "originals.json").write_text(json.dumps(notes))
    assert apply(tree, series).is_applied
    assert (tmp_path / "victim").read_text() == "mine"
