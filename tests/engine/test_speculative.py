# SPDX-License-Identifier: Apache-2.0
"""States that a tier keeps where a prefill step ends inside a prompt. vLLM keeps and offers none of them."""

from pathlib import Path

import pytest

from tests.engine.bar import PLAIN, computed
from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.states import States

pytestmark = [pytest.mark.engine, pytest.mark.processor]

SHARED = 2400
OWN = (1700, 1300)


def siblings() -> list[list[int]]:
    return [prompt(SHARED, seed=1) + prompt(own, seed=own) for own in OWN]


@pytest.mark.parametrize("tier", [pytest.param("cpu", marks=pytest.mark.engines), "disk"])
def test_the_second_sibling_is_restored_where_a_step_of_the_first_ended(
    tiny_model: Path, tmp_path: Path, states: States, tier: str
) -> None:
    """Steps are one block long, so that the last to end inside what both share is known. On disk after a restart."""
    block = states.block_size
    setting = {"speculative_snapshot_tokens": block}
    child = cpu_child(**setting) if tier == "cpu" else disk_child(tmp_path / "root", **setting)
    steps = {**states.arguments, "max_num_batched_tokens": block}
    options = {**steps, "kv_transfer_config": multi(child)}
    first, second = siblings()

    with Engine(tiny_model, **options) as engine:
        assert engine.generate(first).num_cached_tokens == 0
        engine.evict()
        restored = engine.generate(second) if tier == "cpu" else None
    if restored is None:
        with Engine(tiny_model, **options) as engine:
            restored = engine.generate(second)

    assert restored.num_cached_tokens == SHARED // block * block
    with Engine(tiny_model, **{**steps, **PLAIN}) as plain:
        assert restored.same_as(computed(plain, second))
