# SPDX-License-Identifier: Apache-2.0
"""When the copy of a state into the next block is made, in a step that loads KV synchronously: patch 0007."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker import mamba_utils

pytestmark = pytest.mark.patches


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one at each copy; the rest of the function is vLLM's own."""
    made: list[Any] = []
    monkeypatch.setattr(mamba_utils, "do_mamba_copy_block", made.append)
    return made


def preprocess(**more: Any) -> Any:
    """The function as every caller of vLLM 0.32.0 calls it, in a step without requests that still copies."""
    step: Any = SimpleNamespace(
        has_sync_kv_loads=True,
        finished_req_ids=set(),
        preempted_req_ids=set(),
        num_scheduled_tokens={},
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    spec = SimpleNamespace(num_speculative_blocks=0, block_size=64)
    buffers: Any = SimpleNamespace(mamba_group_ids=[0], mamba_spec=spec, offset=0)
    caching: Any = SimpleNamespace(enable_prefix_caching=True)
    batch: Any = SimpleNamespace(req_ids=[])
    unused: Any = None
    return mamba_utils.preprocess_mamba(step, unused, caching, {}, batch, {}, {}, unused, buffers, **more)


def test_a_caller_that_ignores_what_is_returned_has_its_copy_made(copies: list[Any]) -> None:
    assert preprocess() is None
    assert len(copies) == 1


def test_a_caller_that_asks_for_it_makes_the_copy_later(copies: list[Any]) -> None:
    copy = preprocess(copy_later=True)
    assert copies == []
    copy()
    assert len(copies) == 1
