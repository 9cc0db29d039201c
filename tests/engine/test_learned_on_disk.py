# SPDX-License-Identifier: Apache-2.0
"""A full disk tier with the learned policy in a real engine: answers stay exact, and what was learned stays."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.engine.client import Engine, disk_child, multi, prompt
from tests.engine.disk_alone import LENGTH, MAX_TOKENS, counted, stored
from tests.engine.states import FLOAT32
from vllm_overlay.tiers.disk.catalogue import Catalogue

pytestmark = [pytest.mark.engine, pytest.mark.engines]


def test_a_full_tier_ranks_what_it_has_and_the_next_engine_goes_on_with_what_was_learned(
    tiny_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    config = multi(disk_child(root, capacity_bytes="4 MiB", min_free_bytes=0))
    options = {**FLOAT32.arguments, "kv_transfer_config": config}
    with Engine(tiny_model, **options) as engine:
        tokens, cold = stored(engine, 1)
        for turn in range(12):
            engine.generate_many([prompt(LENGTH, 100 + 10 * turn + number) for number in range(4)], MAX_TOKENS)
            engine.evict()
            assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
        assert counted(engine, "evicted_objects") > 0
        assert counted(engine, "restored_tokens") > 0
        assert "eviction policy" not in engine.log
    with closing(Catalogue(str(root))) as catalogue:
        (usage,) = catalogue.usage()
        assert catalogue.learned(usage.fingerprint)
    with Engine(tiny_model, **options) as engine:
        assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
        assert "what eviction has learned" not in engine.log
