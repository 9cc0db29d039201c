# SPDX-License-Identifier: Apache-2.0
"""The kept originals: how a changed series finds the way back from what the one before has left."""

import pytest

from tests.patches.trees import ORIGINALS, THREE_STEPS, A, B, C, contents, make_series, make_tree
from vllm_overlay.patching import tree as patching_tree
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.originals import STATE_DIRECTORY, KeptOriginals
from vllm_overlay.patching.series import FileChain, sha256
from vllm_overlay.patching.states import FileState
from vllm_overlay.patching.tree import apply, reverse, status


def test_a_series_that_changed_finds_its_way_without_the_old_one(tree, tmp_path):
    before = contents(tree)
    source = make_tree(tmp_path / "source")
    old = make_series(tmp_path / "old", source, THREE_STEPS)
    new = make_series(tmp_path / "new", source, {"0001-other.patch": {B: ("b = 1\n", "b = 'one'\n")}})
    apply(tree, old)
    assert status(tree, new).files[B] is FileState.OUTDATED
    assert apply(tree, new).is_applied
    after = contents(tree)
    assert after[A] == before[A] and after[C] == before[C]
    assert after[B] == before[B].replace(b"b = 1\n", b"b = 'one'\n")
    assert reverse(tree, new).is_original
    assert contents(tree) == before


@pytest.mark.parametrize("tampered", [{B}, {C}])
def test_a_kept_original_that_was_tampered_with_is_not_used(tree, tmp_path, tampered):
    """The new series touches b.py; c.py is only the old one's."""
    source = make_tree(tmp_path / "source")
    apply(tree, make_series(tmp_path / "old", source, THREE_STEPS))
    before = contents(tree)
    new = make_series(tmp_path / "new", source, {"0001-other.patch": {B: ("b = 1\n", "b = 'one'\n")}})
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
    chain = FileChain(sha256(other), (("0001-old.patch", sha256(b"patched\n")),))
    KeptOriginals.read(tree).keep({A: chain}, {A: other})
    (tree / A).write_bytes(b"patched\n")
    with pytest.raises(PatchError, match=f"original lost  {A}"):
        action(tree, series)
    assert (tree / A).read_bytes() == b"patched\n"


def test_an_original_that_was_lost_is_kept_again(tree, series, tmp_path):
    """A reverse of version 0.1 that was killed while it removed the directory left the notes without the files."""
    before = contents(tree)
    apply(tree, series)
    for kept in (tree / STATE_DIRECTORY / "originals").iterdir():
        kept.unlink()
    apply(tree, series)
    new = make_series(
        tmp_path / "new", make_tree(tmp_path / "s"), {"0001-other.patch": {B: ("b = 1\n", "b = 'one'\n")}}
    )
    apply(tree, new)
    assert reverse(tree, new).is_original
    assert contents(tree) == before


def test_what_is_kept_is_written_before_the_first_file_is_replaced(tree, series, monkeypatch):
    kept = {}

    def seen(root, wanted):
        originals = KeptOriginals.read(root)
        kept.update({path: originals.find(path, series.chains[path].patched) for path in wanted})

    before = contents(tree)
    monkeypatch.setattr(patching_tree, "replace_files", seen)
    apply(tree, series)
    assert kept == {path: before[path] for path in series.chains}


@pytest.mark.parametrize("notes", ["", "[]", '{"vllm/a.py": 1}', "{"])
def test_damaged_notes_are_none(tree, series, notes):
    before = contents(tree)
    apply(tree, series)
    (tree / STATE_DIRECTORY / "originals.json").write_text(notes)
    assert apply(tree, series).is_applied
    assert reverse(tree, series).is_original
    assert contents(tree) == before


def test_notes_that_name_a_file_outside_are_refused(tree, series, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tree / STATE_DIRECTORY).mkdir()
    (tree / STATE_DIRECTORY / "originals.json").write_text('{"vllm/../../victim": {}}')
    with pytest.raises(PatchError, match="is not a file of vllm/"):
        apply(tree, series)
    assert (tmp_path / "victim").read_text() == "mine"
