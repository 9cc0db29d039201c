# SPDX-License-Identifier: Apache-2.0
"""One running engine on a real small disk: full, out of files, read-only, unmounted, and each time well again."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Judges
from tests.engine.bar import BAR, UNCACHED, distance
from tests.engine.client import Engine, Output, disk_child, multi, prompt
from tests.engine.disk_alone import LENGTH, MAX_TOKENS, counted, stored, works
from tests.engine.states import FLOAT32
from tests.mounts import SmallDisk, on_small_disk, why_not

pytestmark = [
    pytest.mark.engine,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"no small file system can be mounted: {why_not()}"),
]

MIB = 1 << 20
ROUNDS = 20
Answers = list[tuple[list[int], Output]]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A disk that may be filled, and one on which 8 MiB stay free."""
    root, roomy = (tmp_path_factory.mktemp("small-disk") / name for name in ("root", "roomy"))
    root.mkdir(mode=0o700)
    roomy.mkdir(mode=0o700)
    return root, roomy


@pytest.fixture(scope="module")
def engine(tiny_model: Path, roots: tuple[Path, Path]) -> Iterator[Engine]:
    """Both disks are much smaller than the tiers' capacity. What is restored comes from the first."""
    root, roomy = roots
    children = (disk_child(root, min_free_bytes=0), disk_child(roomy, name="roomy", min_free_bytes="8 MiB", load=False))
    launcher = (*on_small_disk(roomy, "16m"), *on_small_disk(root, "16m", max_files=1000))
    options = {**FLOAT32.arguments, "kv_transfer_config": multi(*children)}
    with Engine(tiny_model, launcher=launcher, **options) as running:
        works(running, 0)
        yield running


@pytest.fixture(scope="module")
def disk(engine: Engine, roots: tuple[Path, Path]) -> SmallDisk:
    return SmallDisk(roots[0], engine.pid)


@pytest.fixture(scope="module")
def answers() -> Answers:
    """What was answered while the disk failed."""
    return []


def serve(engine: Engine, answers: Answers, seed: int) -> None:
    """New prompts, several at a time."""
    prompts = [prompt(LENGTH, 10 * seed + number) for number in range(4)]
    answers.extend(zip(prompts, engine.generate_many(prompts, MAX_TOKENS), strict=True))
    engine.wait_for_stores()


def serve_until_dropped(engine: Engine, answers: Answers, seed: int, reason: str) -> None:
    """Until a store more than before was dropped for this reason."""
    before = counted(engine, "dropped_stores", reason=reason)
    for turn in range(ROUNDS):
        serve(engine, answers, seed + turn)
        if counted(engine, "dropped_stores", reason=reason) > before:
            return
    raise AssertionError(f"no store was dropped for {reason} in {ROUNDS} rounds of requests")


def test_more_than_the_disk_holds_is_stored_and_the_free_space_to_keep_is_kept(
    engine: Engine, roots: tuple[Path, Path], disk: SmallDisk
) -> None:
    roomy = SmallDisk(roots[1], engine.pid)
    with roomy.sampled() as samples:
        for turn in range(20):
            serve(engine, [], 100 + turn)
        works(engine, 1)
    assert counted(engine, "evicted_objects") > 0
    assert engine.metric("vllm:hybrid_offload_evicted_objects", connector="roomy") > 0
    assert disk.free_bytes() < 4 * MIB
    assert 8 * MIB <= min(samples) < 12 * MIB


@pytest.mark.parametrize("fault", ["full", "out_of_files"])
def test_a_disk_without_room_drops_stores_until_it_has_room(
    engine: Engine, disk: SmallDisk, answers: Answers, fault: str
) -> None:
    """The bookkeeper sees it in a second, and stores come to ``no_room``; those before that meet the kernel's error."""
    seed = 200 + 100 * (fault == "full")
    tokens, cold = stored(engine, seed)
    for turn in range(ROUNDS):
        dropped = counted(engine, "dropped_stores", reason="no_space")
        with getattr(disk, fault)():
            serve(engine, answers, seed + turn)
            engine.reset_device_cache()
            assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
            if counted(engine, "dropped_stores", reason="no_space") > dropped:
                serve_until_dropped(engine, answers, seed + 50, "no_room")
                break
        works(engine, seed + turn)
    else:
        raise AssertionError("no store met the kernel's error")
    works(engine, seed + 99)


def test_a_disk_that_turns_read_only_is_read_and_its_writes_left_alone_for_a_while(
    engine: Engine, disk: SmallDisk, answers: Answers
) -> None:
    """A bookkeeper that cannot write for seconds gives no more room. On a busy machine that may come before enough
    writes have failed: then again."""
    failed = counted(engine, "dropped_stores", reason="io_error")
    for seed in range(400, 400 + ROUNDS):
        tokens, cold = stored(engine, seed)
        dropped = counted(engine, "dropped_stores", reason="breaker")
        with disk.read_only():
            serve(engine, answers, seed)
            engine.reset_device_cache()
            restored = engine.generate(tokens, MAX_TOKENS)
            assert restored.same_as(cold)
        works(engine, seed)
        if restored.num_cached_tokens and counted(engine, "dropped_stores", reason="breaker") > dropped:
            break
    else:
        raise AssertionError("no breaker has opened while what is there was read")
    assert counted(engine, "dropped_stores", reason="io_error") > failed
    assert engine.log.rfind("writes work again") > engine.log.rfind("writes in a row failed")


def test_a_disk_that_is_unmounted_costs_a_recomputation_and_is_found_again(
    engine: Engine, roots: tuple[Path, Path], disk: SmallDisk, answers: Answers
) -> None:
    """Nothing is written where it was."""
    tokens, cold = stored(engine, 500)
    missed = counted(engine, "failed_loads", reason="missing")
    with disk.gone():
        recomputed = engine.generate(tokens, MAX_TOKENS)
        assert recomputed.same_as(cold)
        assert recomputed.num_cached_tokens == 0
        assert counted(engine, "failed_loads", reason="missing") > missed
        serve(engine, answers, 500)
        assert disk.run(["sh", "-c", 'test -z "$(find "$0" -name "*.r[0-9]")"', str(roots[0])]) == 0
    engine.reset_device_cache()
    assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
    works(engine, 502)


def test_after_all_that_every_answer_is_right_and_the_disk_is_sound(
    engine: Engine, roots: tuple[Path, Path], disk: SmallDisk, answers: Answers, judges: Judges
) -> None:
    serve(engine, answers, 600)
    assert counted(engine, "hook_errors") == 0
    assert disk.run([sys.executable, "-m", "tests.tiers.disk.oracle", str(roots[0])]) == 0
    reference = judges(FLOAT32, UNCACHED)
    assert max(distance(reference, tokens, answer) for tokens, answer in answers) <= BAR
