# SPDX-License-Identifier: Apache-2.0
"""The series as commits, and back."""

import pytest

from devtools.series_commits import check_series, git, open_series, write_series
from tests.patches.trees import ORIGINALS, THREE_STEPS, A, B, C, contents, make_series, make_tree
from vllm_overlay.patching import tree
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.series import load


@pytest.fixture
def source(tmp_path):
    return make_tree(tmp_path / "source")


@pytest.fixture
def patches(tmp_path, source):
    return make_series(tmp_path / "patches", THREE_STEPS).directory


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
    tree.apply(source, load(patches))
    open_series(source, tmp_path / "again", patches)
    git(tmp_path / "again", "checkout", "--quiet", "original")
    assert contents(tmp_path / "again") == before


def test_what_was_not_changed_comes_back_the_same(repository, patches):
    series = load(patches)
    write_series(repository, patches)
    assert load(patches).files == series.files
    texts = {path.name: path.read_bytes() for path in patches.iterdir()}
    assert write_series(repository, patches) == list(THREE_STEPS)
    assert {path.name: path.read_bytes() for path in patches.iterdir()} == texts


def test_a_fixup_goes_into_its_patch_and_moves_the_later_ones(repository, patches):
    path = repository / A
    path.write_text("a = 'new first line'\n" + path.read_text())
    git(repository, "commit", "--all", "--fixup", ":/0001-first.patch")
    with pytest.raises(PatchError, match="autosquash"):
        write_series(repository, patches)
    git(repository, "-c", "sequence.editor=true", "rebase", "--interactive", "--autosquash", "original")
    assert write_series(repository, patches) == list(THREE_STEPS)
    assert "new first line" in (patches / "0001-first.patch").read_text()
    assert "@@ -19,7 +20,7 @@" not in (patches / "0003-third.patch").read_text()


def test_another_vllm_is_tried_patch_by_patch_and_the_rest_is_gits(repository, patches, tmp_path):
    new = make_tree(tmp_path / "new", version="0.33.0")
    (new / A).write_text("a = 'a new line'\n" + ORIGINALS[A])
    (new / B).write_text(ORIGINALS[B].replace("b = 30\n", "").replace("b = 7\n", "b = 70\n"))
    outcomes = check_series(repository, new)
    assert outcomes == {
        "0001-first.patch": f"conflicts: {B}",
        "0002-second.patch": "already there",
        "0003-third.patch": "applies",
    }
    assert git(repository, "status", "--porcelain") == ""
    with pytest.raises(PatchError, match="CONFLICT"):
        git(repository, "rebase", "--onto", "new", "original", "series")
    (repository / B).write_text((new / B).read_text().replace("b = 70\n", "b = 'seven'\n"))
    git(repository, "add", "--all")
    git(repository, "-c", "core.editor=true", "rebase", "--continue")
    git(repository, "tag", "--force", "original", "new")
    assert write_series(repository, patches) == ["0001-first.patch", "0003-third.patch"]
    moved = load(patches)
    make_tree(new, files={})  # the pin has moved to it
    assert tree.apply(new, moved).is_applied
    assert "a new line" in (new / A).read_text() and "b = 'seven'" in (new / B).read_text()


def test_a_cure_of_upstream_is_known_by_its_sign(source, tmp_path):
    patches = make_series(tmp_path / "patches", {"0001-x.patch": {A: ("a = 5\n", "a = 'five'\n")}}).directory
    patch = patches / "0001-x.patch"
    patch.write_text(patch.read_text().replace("none: it is a test", "vllm/a.py: def cure("))
    open_series(source, tmp_path / "repository", patches)
    (source / A).write_text("def cure():\n    pass\n")
    assert check_series(tmp_path / "repository", source)["0001-x.patch"] == "no longer needed: vllm/a.py: def cure("


def test_a_file_that_another_vllm_lacks_is_named(repository, tmp_path):
    new = make_tree(tmp_path / "new", version="0.33.0")
    (new / C).unlink()
    assert check_series(repository, new)["0003-third.patch"] == f"conflicts: {C}"


def test_a_directory_that_is_there_is_left_alone(repository, source, patches):
    with pytest.raises(PatchError, match="exists"):
        open_series(source, repository, patches)
