# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.patches.trees import THREE_STEPS, make_series, make_tree


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


@pytest.fixture
def series(tmp_path):
    return make_series(tmp_path / "patches", THREE_STEPS)
