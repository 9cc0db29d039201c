# SPDX-License-Identifier: Apache-2.0
"""The series as commits, and back."""

import pytest

from devtools.series_commits import git, open_series, write_series
from tests.patches.trees import THREE_STEPS, A, contents, make_series, make_tree
from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import PatchError


@pytest.fixture
def source(tmp_path):
    return make_tree(tmp_path / "source")


@pytest.fixture
def patches(tmp_path, source):
    return make_series(tmp_path / "patches", source, THREE_STEPS).directory


@pytest.fixture
def repository(tmp_path, source, patches):
    open_series(source, tmp_path / "repository", patches)
    return tmp_path / "repository"


def test_each_patch_is_a_commit_with_its_header(repository):
    names = git(repository, "log", "--format=%s", "--reverse").split("\n")
    assert names[1:4] == list(THREE_STEPS)
    assert "Symptom: none" in git(repository, "log", "-1", "--format=%B")


def test_a_patched_source_is_taken_back_first(tmp_path, source, patches, repository):
    before = contents(source)
    tree.apply(source, make_series(tmp_path / "same", make_tree(tmp_path / "other"), THREE_STEPS))
    open_series(source, tmp_path / "again", patches)
    git(tmp_path / "again", "checkout", "--quiet", "original")
    assert contents(tmp_path / "again") == before


def test_what_was_not_changed_comes_back_the_same(repository, patches):
    assert write_series(repository, patches) == []
    texts = {path.name: path.read_bytes() for path in patches.iterdir()}
    assert write_series(repository, patches) == []
    assert {path.name: path.read_bytes() for path in patches.iterdir()} == texts


def test_a_fixup_goes_into_its_patch_and_moves_the_later_ones(repository, patches):
    path = repository / A
    path.write_text("a = 'new first line'\n" + path.read_text())
    git(repository, "commit", "--all", "--fixup", ":/0001-first.patch")
    with pytest.raises(PatchError, match="autosquash"):
        write_series(repository, patches)
    git(repository, "-c", "sequence.editor=true", "rebase", "--interactive", "--autosquash", "original")
    assert write_series(repository, patches) == []
    assert "new first line" in (patches / "0001-first.patch").read_text()
    assert "@@ -19,7 +20,7 @@" not in (patches / "0003-third.patch").read_text()


def test_a_directory_that_is_there_is_left_alone(repository, source, patches):
    with pytest.raises(PatchError, match="exists"):
        open_series(source, repository, patches)
