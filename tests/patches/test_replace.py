# SPDX-License-Identifier: Apache-2.0
"""Files are replaced by renames, and keep what belongs to them."""

import os

from tests.patches.trees import A, installed_originals, make_tree
from vllm_overlay.patching.tree import apply, reverse


def test_a_hard_link_of_a_patched_file_keeps_its_bytes(tmp_path):
    originals = installed_originals()
    other = make_tree(tmp_path / "other", files={path: content.decode() for path, content in originals.items()})
    tree = make_tree(tmp_path / "tree", files={})
    for path in originals:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(other / path, tree / path)
    stamps = {path: (other / path).stat() for path in originals}
    apply(tree)
    for path, original in originals.items():
        assert (other / path).read_bytes() == original != (tree / path).read_bytes()
        now = (other / path).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stamps[path].st_ino, stamps[path].st_mtime_ns)
        assert now.st_nlink == 1


def test_mode_bits_are_kept(tree, series):
    (tree / A).chmod(0o751)
    apply(tree, series)
    assert (tree / A).stat().st_mode & 0o777 == 0o751
    reverse(tree, series)
    assert (tree / A).stat().st_mode & 0o777 == 0o751


def test_bytecode_of_a_changed_file_is_removed_and_of_its_neighbours_kept(tree, series):
    cache = tree / "vllm" / "__pycache__"
    cache.mkdir()
    for name in ("a.cpython-311.pyc", "a.cpython-311.opt-1.pyc", "ab.cpython-311.pyc"):
        (cache / name).write_bytes(b"x")
    apply(tree, series)
    assert [path.name for path in cache.iterdir()] == ["ab.cpython-311.pyc"]


def test_a_patched_tree_that_is_read_only_is_left_alone_without_an_error(tree, series, monkeypatch):
    apply(tree, series)

    def refuse(*names, **keywords):
        raise OSError(30, "Read-only file system")

    for name in ("unlink", "replace", "mkdir", "fchmod"):
        monkeypatch.setattr(os, name, refuse)
    assert apply(tree, series).is_applied
