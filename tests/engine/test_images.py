# SPDX-License-Identifier: Apache-2.0
"""Images in prompts: the same image is restored, another one never, wherever the restored tokens end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.restore import U, restorable
from tests.engine.states import FLOAT32
from tests.models.qwen3_5_vl import IMAGE_TOKEN, VISION_END, VISION_START, make_qwen3_5_vl

pytestmark = pytest.mark.engine

IMAGE_TOKENS = 64
"""That a picture becomes, where the prompt has one."""
BEFORE = 100
A, B = 1, 2
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}

Start = Callable[..., Engine]


@pytest.fixture(
    scope="module", params=[None, pytest.param(NGRAM, marks=pytest.mark.engines)], ids=["no drafts", "ngram"]
)
def start(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Start:
    """Makes an engine with a vision tower."""
    model = make_qwen3_5_vl(tmp_path_factory.mktemp("models") / "vl")
    limits = {"image": 2, "video": 0}
    shape = {**FLOAT32.arguments, "limit_mm_per_prompt": limits, "speculative_config": request.param}
    return lambda **arguments: Engine(model, **shape, **arguments)


@pytest.fixture(scope="module")
def config(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return multi(cpu_child(), disk_child(tmp_path_factory.mktemp("disk") / "root"))


@pytest.fixture(scope="module")
def engine(start: Start, config: dict[str, Any]) -> Iterator[Engine]:
    with start(kv_transfer_config=config) as running:
        yield running


@pytest.fixture(scope="module")
def plain(start: Start) -> Iterator[Engine]:
    """vLLM without a connector, which computes in the same steps. It judges."""
    with start() as running:
        yield running


def with_images(num_after: int, seed: int, num_images: int = 1) -> tuple[list[int], int]:
    """Tokens before, between and after images, and how many the prompt has once images are in their places."""
    tokens = prompt(BEFORE, seed)
    for number in range(num_images):
        tokens += [VISION_START, IMAGE_TOKEN, VISION_END, *prompt(num_after, seed + number + 1)]
    return tokens, len(tokens) + num_images * (IMAGE_TOKENS - 1)


def answer(engine: Engine, tokens: list[int], *images: int) -> tuple[Any, int]:
    """The completion, and how many tokens were not computed. The device cache is empty again."""
    found = engine.call("feature", name="answers", tokens=tokens, images=images, max_tokens=6)
    engine.evict()
    return found["completions"], found["num_cached_tokens"]


def computed(plain: Engine, tokens: list[int], *images: int) -> Any:
    """The completion when nothing of the prompt is cached."""
    plain.reset_device_cache()
    return plain.call("feature", name="answers", tokens=tokens, images=images, max_tokens=6)["completions"]


@pytest.mark.parametrize("num_after", [5, 300], ids=["ends_inside_the_image", "ends_behind_the_image"])
def test_the_same_image_is_restored_and_another_one_is_not(engine: Engine, plain: Engine, num_after: int) -> None:
    tokens, length = with_images(num_after, seed=10 * num_after)
    cold, num_cold = answer(engine, tokens, A)
    assert num_cold == 0
    assert answer(engine, tokens, A) == (cold, restorable(length))
    other, num_other = answer(engine, tokens, B)
    assert num_other <= BEFORE // U * U
    assert other != cold
    assert computed(plain, tokens, A) == cold
    assert computed(plain, tokens, B) == other
    assert answer(engine, tokens, B) == (other, restorable(length))
    assert answer(engine, tokens, A) == (cold, restorable(length))


@pytest.mark.engines
def test_a_second_image_that_differs_is_computed_and_so_are_two_in_another_order(engine: Engine, plain: Engine) -> None:
    tokens, length = with_images(200, seed=7, num_images=2)
    both, _ = answer(engine, tokens, A, B)
    same, num_same = answer(engine, tokens, A, A)
    assert num_same < BEFORE + IMAGE_TOKENS + 2 + 200 + 1
    swapped, num_swapped = answer(engine, tokens, B, A)
    assert num_swapped <= BEFORE // U * U
    assert [computed(plain, tokens, *images) for images in ((A, B), (A, A), (B, A))] == [both, same, swapped]
    assert answer(engine, tokens, A, B) == (both, restorable(length))


@pytest.mark.engines
def test_a_restart_restores_an_image_from_disk_and_no_other(
    start: Start, engine: Engine, config: dict[str, Any]
) -> None:
    tokens, length = with_images(150, seed=8)
    cold, _ = answer(engine, tokens, A)
    with start(kv_transfer_config=config) as restarted:
        assert answer(restarted, tokens, B)[1] <= BEFORE // U * U
        assert answer(restarted, tokens, A) == (cold, restorable(length))
        assert restarted.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
