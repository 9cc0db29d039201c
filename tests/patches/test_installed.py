# SPDX-License-Identifier: Apache-2.0
"""The check at start: is the vLLM of this environment the one that the series makes?"""

import importlib.util
from types import SimpleNamespace

import pytest

from tests.patches.trees import ORIGINALS, A, B, make_tree
from tests.python_path import REPOSITORY, run_python
from vllm_overlay.patching import advice, installed
from vllm_overlay.patching.tree import apply, status


def test_an_unpatched_vllm_is_refused_in_one_sentence_with_the_command(tree, series, is_installed, monkeypatch):
    with pytest.raises(installed.UnpatchedError) as error:
        installed.require()
    sentence = str(error.value)
    assert "lacks the 3 patches" in sentence and "\n" not in sentence
    assert f"`python {REPOSITORY}/tools/apply_patches.py --installed`" in sentence
    monkeypatch.setattr(advice, "_TOOL", tree / "site-packages" / "tools" / "apply_patches.py")
    assert advice.command("--installed") == "python -m vllm_overlay.patching --installed"
    apply(tree, series)
    assert installed.require() == f"vLLM 0.32.0, 3 patches, series {series.id}"


def test_another_vllm_is_refused(tree, series, is_installed):
    apply(tree, series)
    make_tree(tree, version="0.33.0")
    with pytest.raises(installed.UnpatchedError, match=r"vLLM 0\.33\.0 is installed.*apply_patches\.py --installed"):
        installed.require()


def test_a_linked_file_does_not_lead_to_what_other_environments_share(tmp_path, monkeypatch):
    package, cache = tmp_path / "site-packages" / "vllm", tmp_path / "cache" / "vllm" / "__init__.py"
    for directory in (package, cache.parent):
        directory.mkdir(parents=True)
    cache.touch()
    (package / "__init__.py").symlink_to(cache)
    found = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert installed.installed_root() == package.parent


def test_no_vllm_at_all_is_said_so(monkeypatch):
    monkeypatch.setattr(installed, "installed_root", lambda: None)
    with pytest.raises(installed.UnpatchedError, match="vLLM is not installed"):
        installed.require()


def test_the_check_imports_neither_vllm_nor_torch():
    code = (
        "import sys; from vllm_overlay.patching import installed; print(installed.require());"
        "assert not {'vllm', 'torch', 'msgspec', 'numpy'} & set(sys.modules)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "series" in done.stdout


def test_a_changed_file_comes_before_a_half_applied_series(tree, series):
    """The command repairs the one, and refuses the other."""
    (tree / A).write_bytes(series.patched(A, ORIGINALS[A].encode()))
    assert "only in part" in installed._problem(status(tree, series), None)
    (tree / B).write_text("mine\n")
    problem = installed._problem(status(tree, series), None)
    assert f"{B} (edited)" in problem and "--installed --check" in problem
