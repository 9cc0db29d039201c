# SPDX-License-Identifier: Apache-2.0
"""The root that all commands are tried on."""

import pytest

from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import OTHER_NAMESPACE, tier_pair


@pytest.fixture
def root(tmp_path):
    """Two namespaces that nobody serves: a chain of 4 chunks and a snapshot, and one of 2."""
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 4))
    with tier_pair(root, namespace=OTHER_NAMESPACE) as made:
        made.store(chain("q", 2))
    return root
