# SPDX-License-Identifier: Apache-2.0
"""The check at start: is the vLLM of this environment the one that the series makes?"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.trees import ORIGINALS, THREE_STEPS, A, B, C, make_series, make_tree
from vllm_overlay.patching import installed
from vllm_overlay.patching.tree import apply

REPO = Path(__file__).resolve().parents[2]


def test_an_unpatched_vllm_is_refused_in_one_sentence_with_the_command(tree, series, monkeypatch):
    monkeypatch.setattr(installed, "installed_root", lambda: tree)
    monkeypatch.setattr(installed, "load", lambda: series)
    with pytest.raises(installed.UnpatchedError) as error:
        installed.require()
    sentence = str(error.value)
    assert "0001-first.patch" in sentence and "\n" not in sentence
    assert f"`python tools/apply_patches.py --installed` in {REPO}" in sentence
    monkeypatch.setattr(installed, "_PACKAGE", tree / "site-packages" / "vllm_overlay")
    with pytest.raises(installed.UnpatchedError, match=r"`python -m vllm_overlay\.patching --installed`"):
        installed.require()
    apply(tree, series)
    report = installed.require()
    assert str(report) == f"vLLM 0.32.0, series {series.id}: 3 of 3 patches ({', '.join(THREE_STEPS)})"


def test_only_the_needed_patches_are_required(tree, series, monkeypatch, tmp_path):
    first = make_series(
        tmp_path / "one", make_tree(tmp_path / "source"), {n: THREE_STEPS[n] for n in [*THREE_STEPS][:1]}
    )
    apply(tree, first)
    monkeypatch.setattr(installed, "installed_root", lambda: tree)
    monkeypatch.setattr(installed, "load", lambda: series)
    assert installed.require(["0001-first.patch"]).applied == ("0001-first.patch",)
    with pytest.raises(installed.UnpatchedError, match=r"lacks 0002-second\.patch, 0003-third\.patch"):
        installed.require(["0002-second.patch"])
    with pytest.raises(installed.UnpatchedError, match="not in series"):
        apply(tree, series)
        installed.require(["0009-unknown.patch"])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tree: make_tree(tree, version="0.33.0"), "vLLM 0.33.0 is installed"),
        (lambda tree: (tree / A).write_text("mine\n"), r"vllm/a\.py \(edited\)"),
        (lambda tree: (tree / C).unlink(), r"vllm/sub/c\.py \(missing\)"),
    ],
)
def test_another_vllm_is_refused_whatever_is_needed(tree, series, monkeypatch, spoil, said):
    apply(tree, series)
    spoil(tree)
    monkeypatch.setattr(installed, "installed_root", lambda: tree)
    monkeypatch.setattr(installed, "load", lambda: series)
    with pytest.raises(installed.UnpatchedError, match=said) as error:
        installed.require([])
    assert "apply_patches.py --installed" in str(error.value)


def test_no_vllm_at_all_is_said_so(monkeypatch):
    monkeypatch.setattr(installed, "installed_root", lambda: None)
    with pytest.raises(installed.UnpatchedError, match="vLLM is not installed"):
        installed.require()


def test_the_check_imports_neither_vllm_nor_torch():
    code = (
        "import sys; from vllm_overlay.patching import installed; print(installed.verify_installed());"
        "assert not {'vllm', 'torch', 'msgspec', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert "series" in done.stdout


def test_a_changed_file_comes_before_a_half_applied_series(tree, series):
    """The command repairs the one, and refuses the other."""
    (tree / A).write_bytes(series.patched_from(A, ORIGINALS[A].encode()))
    assert "only in part" in installed.verify_installed(series, tree).problem
    (tree / B).write_text("mine\n")
    problem = installed.verify_installed(series, tree).problem
    assert f"{B} (edited)" in problem and "--installed --check" in problem
