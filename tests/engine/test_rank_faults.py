# SPDX-License-Identifier: Apache-2.0
"""One of two ranks fails a load or a store: the object has failed, in all ranks; the engine goes on."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.binding import BINDING
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.damage import DAMAGES
from tests.engine.restore import assert_restored, restorable
from tests.engine.states import FLOAT32
from tests.engine.test_switches import switch
from tests.tiers.disk import oracle
from tests.tiers.disk.files import object_files
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.faults]

LENGTH = 150
RANKS = (0, 1)


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt that was stored and restored: its answer when it was computed, and the disk tier's files of it."""

    seed: int
    cold: Output
    files: set[Path]


class TwoRanks:
    """An engine of two ranks with both tiers, of which the control file lets one serve."""

    def __init__(self, engine: Engine, root: Path, control: Path) -> None:
        self.engine, self.root, self._control = engine, root, control
        self._tier = ""

    def serves(self, tier: str) -> None:
        """From now on this tier alone stores and loads."""
        if self._tier != tier:
            other = {"cpu": "disk", "disk": "cpu"}[tier]
            switch(self.engine, self._control, {other: {"load": False, "store": False}})
            self._tier = tier

    def counted(self, name: str, **labels: str) -> float:
        return self.engine.metric(f"vllm:hybrid_offload_{name}", connector=self._tier, **labels)

    def answers(self, seed: int) -> Output:
        """To a prompt that the device cache has lost."""
        self.engine.evict()
        answer = self.engine.generate(prompt(LENGTH, seed), max_tokens=3)
        self.engine.wait_for_stores()
        return answer

    def works(self, seed: int) -> Stored:
        """What is stored now is restored. A write may need a second: room comes with the bookkeeper's next turn."""
        seeds = itertools.count(seed + 1)

        def restored() -> Stored | None:
            seed, before = next(seeds), self.files()
            cold, again = self.answers(seed), self.answers(seed)
            assert again.same_as(cold)
            if not again.num_cached_tokens:
                return None
            assert_restored(cold, again, LENGTH)
            return Stored(seed, cold, self.files() - before)

        found = until(restored, "a store that is restored")
        assert found is not None
        return found

    def works_again(self, stored: Stored) -> None:
        """The prompt is restored once more. A load ends with the first bad object that it meets: several may fail."""

        def is_restored() -> bool:
            answer = self.answers(stored.seed)
            assert answer.same_as(stored.cold)
            return answer.num_cached_tokens >= restorable(LENGTH)

        until(is_restored, "a restore of the prompt")

    def files(self) -> set[Path]:
        return set(object_files(self.root))

    def names(self) -> set[str]:
        """Of objects of which some rank has a file."""
        return {str(path.with_suffix("")) for path in self.files()}

    @contextmanager
    def fault(self, rank: int, name: str, **arguments: Any) -> Iterator[None]:
        """Of the disk tier of one rank."""
        self.engine.call("fault_in_rank", rank=rank, name=name, **arguments)
        try:
            yield
        finally:
            self.engine.call("fault_in_rank", rank=rank, name="disk_of_rank_works", root=str(self.root))
            self.engine.call("fault", name="resume_loads")


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    directory = tmp_path_factory.mktemp("ranks")
    control = directory / "control.json"
    config = multi(cpu_child(), disk_child(directory / "root"), control_file=str(control))
    arguments = {"tensor_parallel_size": 2, **FLOAT32.arguments, "kv_transfer_config": config}
    with Engine(tiny_model, BINDING, **arguments) as engine:
        yield TwoRanks(engine, directory / "root", control)


@pytest.fixture
def disk(ranks: TwoRanks) -> TwoRanks:
    ranks.serves("disk")
    return ranks


@pytest.fixture
def cpu(ranks: TwoRanks) -> TwoRanks:
    ranks.serves("cpu")
    return ranks


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_rank_that_cannot_read_fails_the_load_and_the_request_is_computed(
    disk: TwoRanks, call: str, rank: int
) -> None:
    seed = 10_000 + 1_000 * rank + 100 * len(call)
    cold = disk.answers(seed)
    failed = disk.counted("failed_loads")
    with disk.fault(rank, "disk_raises", calls=[call], error="EIO"):
        recomputed = disk.answers(seed)
    assert recomputed.same_as(cold)
    assert recomputed.num_cached_tokens == 0
    assert disk.counted("failed_loads") == failed + 1
    assert disk.answers(seed).same_as(cold)
    disk.works(seed)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("call", "error"), [("pwritev", "ENOSPC"), ("pwritev", "EIO")])
def test_a_store_that_fails_in_one_rank_is_never_found_and_leaves_nothing(
    disk: TwoRanks, call: str, error: str, rank: int
) -> None:
    seed = 20_000 + 1_000 * rank + 100 * len(error)
    disk.works(seed)
    before, dropped, failed = disk.names(), disk.counted("dropped_stores"), disk.counted("failed_loads")
    with disk.fault(rank, "disk_raises", calls=[call], error=error):
        cold = disk.answers(seed)
        recomputed = disk.answers(seed)
    assert recomputed.same_as(cold)
    assert recomputed.num_cached_tokens == 0
    assert disk.counted("dropped_stores") > dropped
    assert disk.counted("failed_loads") == failed  # it was not even offered
    until(lambda: disk.names() <= before, "the end of a failed store's files")
    disk.works(seed + 500)
    cold = disk.answers(seed)
    assert_restored(cold, disk.answers(seed), LENGTH)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_of_one_rank_is_a_failed_load_and_the_object_is_stored_anew(
    disk: TwoRanks, damage: Any, rank: int
) -> None:
    seed = 30_000 + 1_000 * rank + 100 * DAMAGES.index(damage)
    stored = disk.works(seed)
    failed = disk.counted("failed_loads")
    mine = sorted(path for path in stored.files if path.suffix == f".r{rank}")
    assert mine
    damage(mine)
    recomputed = disk.answers(stored.seed)
    assert recomputed.same_as(stored.cold)
    assert recomputed.num_cached_tokens == 0
    assert disk.counted("failed_loads") > failed
    disk.works_again(stored)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", ["set_loads_broken", "set_loads_silent"])
def test_a_rank_whose_cpu_tier_fails_or_is_silent_costs_a_recomputation(cpu: TwoRanks, name: str, rank: int) -> None:
    seed = 40_000 + 1_000 * rank + 100 * len(name)
    cold = cpu.answers(seed)
    failed = cpu.counted("failed_loads")
    cpu.engine.call("fault_in_rank", rank=rank, name=name, on=True)
    recomputed = cpu.answers(seed)
    cpu.engine.call("fault_in_rank", rank=rank, name=name, on=False)
    assert recomputed.same_as(cold)
    assert recomputed.num_cached_tokens == 0
    assert cpu.counted("failed_loads") > failed
    cpu.works(seed)


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_cannot_copy_out_keeps_the_object_from_all(cpu: TwoRanks, rank: int) -> None:
    seed = 50_000 + 1_000 * rank
    cpu.works(seed)
    objects, dropped = cpu.counted("objects"), cpu.counted("dropped_stores")
    cpu.engine.call("fault_in_rank", rank=rank, name="set_gather_broken", on=True)
    cold = cpu.answers(seed)
    recomputed = cpu.answers(seed)
    cpu.engine.call("fault_in_rank", rank=rank, name="set_gather_broken", on=False)
    assert recomputed.same_as(cold)
    assert recomputed.num_cached_tokens == 0
    assert cpu.counted("dropped_stores") > dropped
    assert cpu.counted("objects") == objects
    cpu.works(seed)


def test_after_all_that_nothing_is_pending_and_the_root_is_sound(disk: TwoRanks) -> None:
    disk.engine.wait_for_stores()
    assert disk.counted("pending_loads") == 0
    assert disk.counted("pending_stores") == 0
    assert oracle.problems(disk.root) == []
