# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that puts our tier in the fs tier's place, in a module of vLLM's own tests (test_upstream.py)."""

import time
from typing import Any

import pytest

from vllm_overlay.offloading import tier as module
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.files.writer import path_of

PATIENCE_S = 100.0

module.engine_being_built = lambda: None  # type: ignore[assignment, return-value]
module.namespace_of = lambda *_: DiskNamespace("ab" * 32, "ab" * 32, {"model": "tiny"})


class InPlaceOfFs(module.HybridDiskTier):
    """Made with the fs tier's settings. Its lookups need no second step, and its ``file_mapper`` knows where an object
    lies."""

    def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, root_dir: str, **_: Any) -> None:
        spec = offloading_spec
        if not spec.config.groups:
            object.__setattr__(spec.config, "groups", (type("Group", (), {"tokens_per_block": 16}),))
        super().__init__(spec, primary_kv_view, tier_type, root=root_dir, capacity_bytes="1 GiB", min_free_bytes=0)
        self.file_mapper = self
        self._lookup_manager = type("Lookups", (), {"_lookup_batch": []})

    def get_file_name(self, key: Any) -> str:
        entry = self._manager.index.get(module._object_id(key))
        assert entry is not None
        return str(path_of(self._worker._root, self._manager._tickets.file(entry.ticket), 0))

    def step(self) -> list[Any]:
        found = list(self.get_finished_jobs())
        self.on_schedule_end(None)  # type: ignore[arg-type]
        return found


def drain(tier: InPlaceOfFs) -> list[Any]:
    """In place of the tests' own, which calls ``drain_jobs``: vLLM resets a cache with that, and ours then forgets."""
    found, deadline = tier.step(), time.monotonic() + PATIENCE_S
    while tier._jobs and time.monotonic() < deadline:
        found += tier.step()
        time.sleep(0.001)
    return found


def lookup_and_wait(tier: InPlaceOfFs, keys: Any, ctx: Any = None, timeout: float = 0.0) -> list[Any]:
    """In place of the tests' own, which waits for the fs tier's thread of lookups."""
    return [tier.lookup(key, ctx) for key in keys]


@pytest.fixture(autouse=True)
def in_place_of_fs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, ours in (("FileSystemTierManager", InPlaceOfFs), ("drain", drain), ("lookup_and_wait", lookup_and_wait)):
        monkeypatch.setattr(request.module, name, ours)
