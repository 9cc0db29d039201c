# SPDX-License-Identifier: Apache-2.0
"""Every way a disk can fail, in one running engine: a miss or a dropped store, counted; the output is equal."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, disk_child, multi, prompt
from tests.engine.damage import DAMAGES, flip
from tests.engine.disk_alone import LENGTH, MAX_TOKENS, counted, stored, works
from tests.engine.restore import assert_restored
from tests.engine.states import FLOAT32
from tests.tiers.disk import oracle
from tests.tiers.disk.files import object_files
from tests.waiting import until
from vllm_overlay.tiers.disk.catalogue import Catalogue, File

pytestmark = pytest.mark.engine

LOAD_TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk tier's."""
    return tmp_path_factory.mktemp("faults") / "root"


@pytest.fixture(scope="module")
def engine(tiny_model: Path, root: Path) -> Iterator[Engine]:
    """One engine with a disk tier alone, so that every restore is read from the disk."""
    child = disk_child(root, load_timeout_s=LOAD_TIMEOUT_S)
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=multi(child)) as running:
        works(running, 0)  # compiles what is compiled at first use
        yield running


@contextmanager
def fault(engine: Engine, root: Path, fault_name: str, **arguments: Any) -> Iterator[None]:
    engine.call("fault", name=fault_name, **arguments)
    try:
        yield
    finally:
        engine.call("fault", name="disk_works", root=str(root))


EVERY_CALL = ["open", "preadv", "pwritev", "lstat", "unlink"]
FAULTS = [
    *((calls, "EIO") for calls in (["open"], ["preadv"], ["pwritev"], ["unlink"])),
    *((EVERY_CALL, error) for error in ("ESTALE", "ETIMEDOUT")),
    *((["open", "pwritev"], error) for error in ("ENOSPC", "EDQUOT")),
    (["open", "unlink", "mkdir"], "EROFS"),
    *((["open"], error) for error in ("EMFILE", "EACCES")),
]
FAILS_LOADS = {"open", "preadv"}
FAILS_STORES = {"open", "pwritev"}


@pytest.mark.parametrize(("calls", "error"), FAULTS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_an_error_of_the_disk_costs_a_recomputation(engine: Engine, root: Path, calls: list[str], error: str) -> None:
    seed = FAULTS.index((calls, error)) + 1
    tokens, cold = stored(engine, seed)
    failed, dropped = counted(engine, "failed_loads"), counted(engine, "dropped_stores")
    with fault(engine, root, "disk_raises", calls=calls, error=error):
        recomputed = engine.generate(tokens, MAX_TOKENS)
        engine.generate(prompt(LENGTH, seed + 100), MAX_TOKENS)
        engine.wait_for_stores()
    assert recomputed.same_as(cold)
    if set(calls) & FAILS_LOADS:
        assert recomputed.num_cached_tokens == 0
        assert counted(engine, "failed_loads") > failed
    else:
        assert recomputed.num_cached_tokens > 0
    if set(calls) & FAILS_STORES:
        assert counted(engine, "dropped_stores") > dropped
    engine.reset_device_cache()
    assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
    works(engine, seed)


def test_a_disk_that_hangs_holds_a_request_once_and_the_next_not_at_all(engine: Engine, root: Path) -> None:
    (one, one_cold), (two, two_cold) = stored(engine, 31), stored(engine, 32)
    late, rested = counted(engine, "failed_loads", reason="timeout"), counted(engine, "lookup_limits", reason="breaker")
    with fault(engine, root, "disk_delays", seconds=600):
        assert engine.generate(one, MAX_TOKENS).same_as(one_cold)
        assert engine.generate(two, MAX_TOKENS).same_as(two_cold)
        assert counted(engine, "failed_loads", reason="timeout") == late + 1
        assert counted(engine, "lookup_limits", reason="breaker") > rested
    works(engine, 31)


def test_a_disk_that_takes_a_second_a_call_is_waited_for(engine: Engine, root: Path) -> None:
    tokens, cold = stored(engine, 33)
    with fault(engine, root, "disk_delays", seconds=1.0):
        assert_restored(cold, engine.generate(tokens, MAX_TOKENS), LENGTH)
    works(engine, 33)


@pytest.mark.parametrize("error", ["ENOLCK", "EIO"])
def test_locks_that_are_lost_change_nothing_for_who_serves(engine: Engine, root: Path, error: str) -> None:
    tokens, cold = stored(engine, 34 + len(error))
    with fault(engine, root, "locks_raise", error=error):
        assert_restored(cold, engine.generate(tokens, MAX_TOKENS), LENGTH)
    works(engine, 34 + len(error))


@pytest.mark.parametrize("error", ["Busy", "Unavailable"])
def test_while_the_catalogue_fails_what_is_known_is_loaded_and_stores_are_told_later(
    engine: Engine, root: Path, error: str
) -> None:
    tokens, cold = stored(engine, 44 + len(error))
    new = prompt(LENGTH, 144 + len(error))
    with fault(engine, root, "catalogue_raises", error=error):
        assert_restored(cold, engine.generate(tokens, MAX_TOKENS), LENGTH)
        first = engine.generate(new, MAX_TOKENS)
        engine.wait_for_stores()
    works(engine, 44 + len(error))
    engine.reset_device_cache()
    assert_restored(first, engine.generate(new, MAX_TOKENS), LENGTH)


@pytest.mark.parametrize("seconds", [-1e9, 1e9])
def test_jumps_of_the_clock_change_nothing(engine: Engine, root: Path, seconds: float) -> None:
    seed = 50 + int(seconds > 0)
    tokens, cold = stored(engine, seed)
    with fault(engine, root, "clock_jumps", seconds=seconds):
        assert_restored(cold, engine.generate(tokens, MAX_TOKENS), LENGTH)
        works(engine, seed)


@pytest.mark.processor
def test_a_real_limit_of_file_sizes_drops_stores(engine: Engine, root: Path) -> None:
    dropped = counted(engine, "dropped_stores", reason="io_error")
    limit = FLOAT32.num_bytes  # above the engine's log, below a snapshot and its header
    with fault(engine, root, "limit_resource", limit="RLIMIT_FSIZE", value=limit):
        assert len(engine.log.encode()) < limit
        tokens, cold = stored(engine, 60)
        assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
    assert counted(engine, "dropped_stores", reason="io_error") > dropped
    works(engine, 60)


def test_a_process_that_is_out_of_descriptors_recomputes_and_keeps_its_objects(engine: Engine, root: Path) -> None:
    tokens, cold = stored(engine, 61)
    with fault(engine, root, "limit_resource", limit="RLIMIT_NOFILE", value=3):
        recomputed = engine.generate(tokens, MAX_TOKENS)
    assert recomputed.same_as(cold)
    assert recomputed.num_cached_tokens == 0
    engine.reset_device_cache()
    assert_restored(cold, engine.generate(tokens, MAX_TOKENS), LENGTH)


def test_a_permission_that_is_lost_costs_a_recomputation(engine: Engine, root: Path) -> None:
    tokens, cold = stored(engine, 62)
    failed = counted(engine, "failed_loads")
    with fault(engine, root, "lose_permission", directory=str(root)):
        recomputed = engine.generate(tokens, MAX_TOKENS)
    assert recomputed.same_as(cold)
    assert recomputed.num_cached_tokens == 0
    assert counted(engine, "failed_loads") > failed
    works(engine, 62)


def uncatalogued(root: Path, files: list[Path]) -> set[File]:
    """Those of these files that have no row yet: one that goes before is forgotten, and no load of it fails."""
    with closing(Catalogue(str(root))) as catalogue:
        there = {file for path in files if (file := oracle.file_at(path)) is not None}
        return there - catalogue.named(there)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_files_that_were_changed_are_never_loaded(engine: Engine, root: Path, damage: Any) -> None:
    seed = 70 + DAMAGES.index(damage)
    before = set(object_files(root))
    tokens, cold = stored(engine, seed)
    failed = counted(engine, "failed_loads")
    files = sorted(set(object_files(root)) - before)
    until(lambda: not uncatalogued(root, files), "rows of the catalogue")
    damage(files)
    recomputed = engine.generate(tokens, MAX_TOKENS)
    assert recomputed.same_as(cold)
    assert recomputed.num_cached_tokens == 0
    assert counted(engine, "failed_loads") > failed
    works(engine, seed)


def test_one_load_finds_all_files_of_a_prompt_that_have_rotted(engine: Engine, root: Path) -> None:
    length = 700
    before = set(object_files(root))
    tokens = prompt(length, 76)
    cold = engine.generate(tokens, MAX_TOKENS)
    engine.wait_for_stores()
    files = sorted(set(object_files(root)) - before)
    until(lambda: not uncatalogued(root, files), "rows of the catalogue")
    engine.reset_device_cache()
    flip(files[2::3])
    assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
    engine.evict()
    failed = counted(engine, "failed_loads")
    assert_restored(cold, engine.generate(tokens, MAX_TOKENS), length)
    assert counted(engine, "failed_loads") == failed


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_root_that_goes_while_it_is_served_costs_a_recomputation(
    engine: Engine, root: Path, is_replaced: bool
) -> None:
    tokens, cold = stored(engine, 80 + is_replaced)
    gone = root.rename(root.with_name("gone"))  # at once: the tier may make it anew while files are unlinked
    shutil.rmtree(gone, ignore_errors=True)
    if is_replaced:
        root.mkdir(mode=0o700, exist_ok=True)
    assert engine.generate(tokens, MAX_TOKENS).same_as(cold)
    works(engine, 80 + is_replaced)
    assert any(root.glob("catalogue-*.sqlite")) and object_files(root)


def test_after_all_that_no_hook_has_failed_and_the_root_is_sound(engine: Engine, root: Path) -> None:
    engine.wait_for_stores()
    assert counted(engine, "hook_errors") == 0
    assert oracle.problems(root) == []
