# SPDX-License-Identifier: Apache-2.0
"""The root that all commands are tried on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from vllm_overlay import versions
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY, OBJECT_FORMAT, DiskNamespace


@dataclass(frozen=True)
class Keyed:
    """A root, the key of its objects, and the settings of who serves it."""

    root: Path
    key_file: Path
    settings: dict[str, Any]


@pytest.fixture
def root(tmp_path):
    """Two namespaces that nobody serves: a chain of 4 chunks and a snapshot, and one of 2."""
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 4))
    with tier_pair(root, namespace=OTHER_NAMESPACE) as made:
        made.store(chain("q", 2))
    return root


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.fixture
def keyed(tmp_path, key_file):
    """A chain of 4 chunks and a snapshot."""
    words = {INTEGRITY: integrity_of(str(key_file)).name, OBJECT_FORMAT: versions.DISK_OBJECT}
    description = {**NAMESPACE.description, **words}
    namespace = DiskNamespace(NAMESPACE.attention, NAMESPACE.snapshot, description)
    settings = {"integrity_key_file": str(key_file), "namespace": namespace}
    with tier_pair(tmp_path / "root", **settings) as made:
        made.store(chain("p", 4))
    return Keyed(tmp_path / "root", key_file, settings)
