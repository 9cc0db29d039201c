# SPDX-License-Identifier: Apache-2.0
"""Small trees and series, as files, as a git checkout where git is, and as the installed vLLM."""

import shutil

import pytest

from tests.patches.trees import THREE_STEPS, make_series, make_tree, run_command
from vllm_overlay.patching import installed


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


@pytest.fixture
def series(tmp_path):
    return make_series(tmp_path / "patches", THREE_STEPS)


@pytest.fixture
def is_installed(tree, series, monkeypatch):
    """The check at start looks at the tree."""
    monkeypatch.setattr(installed, "installed_root", lambda: tree)
    monkeypatch.setattr(installed, "load", lambda: series)


@pytest.fixture
def checkout(tmp_path):
    """A git checkout: it does not say its version."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    tree = make_tree(tmp_path / "checkout", version=None)
    run_command("git init --quiet && git add . && git commit --quiet -m vLLM && git tag v0.32.0", tree)
    return tree
