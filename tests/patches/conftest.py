# SPDX-License-Identifier: Apache-2.0
"""Small trees and series, and git where it is."""

import shutil

import pytest

from tests.patches.trees import THREE_STEPS, make_series, make_tree


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


@pytest.fixture
def series(tmp_path):
    return make_series(tmp_path / "patches", THREE_STEPS)


@pytest.fixture
def needs_git():
    if shutil.which("git") is None:
        pytest.skip("no git here")
