# SPDX-License-Identifier: Apache-2.0
"""Which prompts restore what: extensions, strangers, and one that is a token past a match unit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored, restorable
from tests.engine.states import States

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tiny_model: Path, states: States, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine with both tiers."""
    config = multi(cpu_child(), disk_child(tmp_path_factory.mktemp("disk") / "root"))
    with Engine(tiny_model, **states.arguments, kv_transfer_config=config) as running:
        yield running


@pytest.mark.parametrize("extension", [1, 10, 1000])
@pytest.mark.parametrize("length", [640, 641, 1153, 3000])
def test_a_longer_prompt_restores_at_least_what_it_extends(engine: Engine, length: int, extension: int) -> None:
    stored = prompt(length, seed=1000 * length + extension)
    engine.generate(stored)
    longer = stored + prompt(extension, seed=extension)
    engine.reset_device_cache()
    restored = engine.generate(longer)
    assert restored.num_cached_tokens >= restorable(length)
    engine.reset_device_cache()
    assert_restored(restored, engine.generate(longer), length + extension)


def test_a_prompt_that_differs_in_its_first_token_restores_nothing(engine: Engine) -> None:
    tokens = prompt(2000, seed=21)
    engine.generate(tokens)
    engine.reset_device_cache()
    other = [(tokens[0] + 1) % 256, *tokens[1:]]
    assert engine.generate(other).num_cached_tokens == 0


def test_restoring_a_unit_less_does_not_change_a_prompt_one_token_past_a_match_unit(engine: Engine) -> None:
    """vLLM ends the prefill at the last match unit and computes the last token alone, wherever the prefill begins."""
    tokens = prompt(961, seed=41)
    cold = engine.generate(tokens, salts=["all"])
    engine.generate(tokens[:900], salts=["less"])
    engine.evict()
    restored = engine.generate(tokens, salts=["all"])
    restored_less = engine.generate(tokens, salts=["less"])
    assert [answer.num_cached_tokens for answer in (restored, restored_less)] == [960, 896]
    assert restored.same_as(cold) and restored_less.same_as(cold)
