# SPDX-License-Identifier: Apache-2.0
"""The disk tier behind vLLM's OffloadingConnector, job by job."""

import collections
import contextlib
import functools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig

from tests.engine.client import multi
from tests.engine.damage import flip
from tests.offloading.lent_rows import ROW_BYTES, LentRows, keys
from tests.tiers.disk.files import bytes_under
from tests.tiers.disk.inside import room_bytes
from tests.waiting import until
from vllm_overlay import plugin
from vllm_overlay.common import circuit_breaker
from vllm_overlay.common.reasons import FAILED_LOADS
from vllm_overlay.config import ConfigError
from vllm_overlay.offloading import tier as module
from vllm_overlay.offloading.connector import OffloadingConnector, engine_being_built
from vllm_overlay.offloading.tier import HybridDiskTier
from vllm_overlay.settings.early_check import check
from vllm_overlay.tiers.disk import worker as disk_worker
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace

Make = Callable[..., LentRows]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Tiers on one root, of one namespace, that have room for stores. They are shut down at the end."""
    made: list[LentRows] = []
    monkeypatch.setattr(module, "engine_being_built", lambda: None)
    monkeypatch.setattr(module, "namespace_of", lambda *_: DiskNamespace("ab" * 32, "ab" * 32, {"model": "tiny"}))

    def one(**settings: Any) -> LentRows:
        lent = LentRows(**{"root": str(tmp_path / "root"), **settings})
        made.append(lent)
        until(lambda: room_bytes(lent.tier._manager), "room")
        return lent

    yield one
    for lent in made:
        lent.shutdown()


def objects(root: Path) -> list[Path]:
    return sorted(root.glob("root/*/*/*.r0"))


def test_what_was_stored_is_loaded_into_other_rows_also_by_the_next_engine(make: Make) -> None:
    first, names = make(), [*keys(3), *keys(2, group=1)]
    first.fill(range(5))
    stored = first.store(names, range(5))
    assert stored.success
    first.shutdown()
    second = make()
    until(lambda: all(map(second.has, names)), "what the first engine has stored")
    assert second.load(names, range(20, 25)).success
    assert (second.rows[20:25] == first.rows[:5]).all()
    assert not second.has(keys(1, group=2)[0])


def test_after_a_shutdown_nobody_looks_at_vllms_memory_which_it_unmaps(make: Make) -> None:
    lent = make()
    assert np.shares_memory(lent.tier._worker._rows, lent.rows)
    lent.shutdown()
    assert not np.shares_memory(lent.tier._worker._rows, lent.rows)


def test_a_job_of_nothing_ends(make: Make) -> None:
    lent = make()
    assert lent.store([], []).success
    assert lent.load([], []).success


def test_a_job_larger_than_the_staging_memory_is_stored_as_a_whole(make: Make) -> None:
    lent, names = make(staging_bytes=4 * ROW_BYTES), keys(20)
    lent.fill(range(20))
    assert lent.store(names, range(20)).success
    assert all(map(lent.has, names))


def test_rows_wait_while_too_many_are_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no staging memory, which would bound them."""
    monkeypatch.setattr(disk_worker, "MAX_PENDING_STORES", 0)
    lent = make(load_timeout_s=0.05)
    assert not lent.store(keys(1), [0]).success


def test_a_flipped_bit_fails_its_own_key_which_is_a_miss_until_it_is_stored_anew(make: Make, tmp_path: Path) -> None:
    lent, names = make(), keys(4)
    lent.fill(range(4))
    lent.store(names, range(4))
    until(lambda: len(objects(tmp_path)) == 4)
    flip(objects(tmp_path)[1:2])
    loaded = lent.load(names, range(10, 14))
    assert not loaded.success
    bad = [name for name in names if name not in (loaded.successful_keys or ())]
    assert len(bad) == 1
    assert [lent.has(name) for name in names] == [name not in bad for name in names]
    row = names.index(bad[0])
    until(lambda: lent.store(bad, [row]).success, "room for it in so short a time")
    assert lent.load(names, range(10, 14)).success
    assert (lent.rows[10:14] == lent.rows[:4]).all()


def test_a_read_that_hangs_fails_its_job_pauses_loads_and_touches_no_row_afterwards(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(circuit_breaker, "time", clock)
    first, names = make(), keys(2)
    first.fill(range(2))
    first.store(names, range(2))
    first.shutdown()
    lent = make(load_timeout_s=0.05)
    until(lambda: all(map(lent.has, names)), "what the first engine has stored")
    device = lent.gate("preadv")
    job = lent.submit(names, [8, 9], is_load=True)
    device.await_call()
    result = lent.result(job)
    assert not result.success
    assert not result.successful_keys
    paused = {("hybrid_disk",): 1}
    assert lent.tier.get_stats().data["data"]["vllm:hybrid_offload_loads_paused"] == paused
    clock.monotonic = lambda: circuit_breaker.FIRST_PAUSE_S
    assert lent.tier.get_stats().data["data"]["vllm:hybrid_offload_loads_paused"] == dict.fromkeys(paused, 0)
    lent.rows[8:10] = 77
    device.gate.set()
    lent.shutdown()
    assert (lent.rows[8:10] == 77).all()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_write_that_hangs_gives_rows_back_and_leaves_nothing_of_its_job(
    make: Make, tmp_path: Path, is_encrypted: bool
) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    settings = {"encryption_key_file": str(tmp_path / "key")} if is_encrypted else {}
    lent, names = make(load_timeout_s=0.05, staging_bytes=4 * ROW_BYTES, **settings), keys(8)
    first = keys(1, "first")
    until(lambda: lent.store(first, [10]).success and lent.has(first[0]), "a store in time")
    device = lent.gate("pwritev")
    lent.fill(range(8))
    job = lent.submit(names, range(8), is_load=False)  # more than is written, or staged, at once
    device.await_call()
    assert not lent.result(job).success
    lent.rows[:8] = 77
    assert not lent.tier.has_pending_work()  # an idle engine does not step for a disk that hangs
    device.gate.set()
    until(lambda: lent.step() or not lent.tier._stores, "the end of the writes")
    assert not any(map(lent.has, names))
    until(lambda: len(objects(tmp_path)) == 1, "the end of what they have written")
    # A store is content with one of the same key that is under way, also if that one is too late.
    one = names[:1]
    until(lambda: lent.store(one, [0]).success and lent.load(one, [11]).success, "a store and a load in time")
    assert (lent.rows[11] == 77).all()


def test_vllm_can_unmap_its_memory_while_a_disk_holds_what_is_written(make: Make) -> None:
    lent = make(load_timeout_s=0.05, shutdown_timeout_s=0.05)
    device = lent.gate("pwritev")
    lent.submit(keys(1), [0], is_load=False)
    device.await_call()
    lent.shutdown()
    del lent.rows, lent.tier  # as vLLM does
    lent.memory.close()  # which fails while somebody has a part of it
    device.gate.set()


def test_rows_are_taken_back_while_a_thread_copies_from_another_job_s(make: Make) -> None:
    worker = make().tier._worker
    worker.lend(1, 0)
    worker.lend(2, 1)
    with worker._row(1):
        taking = threading.Thread(target=worker.take_back, args=([2],), daemon=True)
        taking.start()
        until(lambda: not taking.is_alive(), "the row of the other job")


def test_a_load_that_fails_at_once_leaves_no_row_lent(make: Make) -> None:
    lent, names = make(), keys(2)
    assert lent.store(names, range(2)).success
    lent.tier._worker.load_was_late("another")
    assert not lent.load(names, [8, 9]).success
    assert not lent.tier._worker._row_of


def test_after_draining_nothing_touches_a_row_and_nothing_older_is_loaded(make: Make) -> None:
    lent, names, more = make(), keys(2), keys(2, "more")
    lent.fill(range(4))
    assert lent.store(names, range(2)).success
    device = lent.gate("pwritev")
    job = lent.submit(more, [2, 3], is_load=False)
    device.await_call()
    lent.tier.drain_jobs()
    assert [(one.job_id, one.success) for one in lent.tier.get_finished_jobs()] == [(job, False)]
    device.gate.set()
    assert not any(map(lent.has, [*names, *more]))
    lent.fill([6], 5)
    lent.store(names[:1], [6])
    assert lent.load(names[:1], [7]).success
    assert (lent.rows[7] == lent.rows[6]).all()
    device = lent.gate("preadv")
    job = lent.submit(names[:1], [8], is_load=True)
    device.await_call()
    lent.tier.drain_jobs()
    stats = lent.tier.get_stats().data["data"]
    assert stats["vllm:hybrid_offload_failed_loads"] == {("hybrid_disk", "closed"): 1}
    assert stats["vllm:hybrid_offload_loads_paused"] == {("hybrid_disk",): 0}  # that was no fault of the disk
    device.gate.set()


def test_stores_that_find_no_room_fail_and_what_is_there_is_not_written_again(make: Make, tmp_path: Path) -> None:
    lent, names = make(), keys(4)
    lent.fill(range(4))
    lent.store(names, range(4))
    assert lent.store(names, range(4)).success
    assert len(objects(tmp_path)) == 4


def test_stores_that_have_waited_for_the_disk_still_wait_for_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_S", 10.0)
    lent, names, real, ahead_s = make(), keys(3), time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: real() + ahead_s[0])
    with monkeypatch.context() as behind:
        behind.setattr(lent.tier._worker, "begin_store", lambda ticket: None)
        job = lent.submit(names, range(3), is_load=False)
        ahead_s[0] = 2 * module.ROOM_S
    with monkeypatch.context() as full:
        full.setattr(lent.tier._manager, "reserve", lambda planned: None)
        until(lambda: lent.step() or not lent.tier._stores, "the end of the first write")
        assert lent.tier.has_pending_work()
    assert lent.result(job).success


def test_a_job_does_not_pay_for_the_time_that_another_waited_for_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOM_S", 10.0)
    lent, real, ahead_s = make(), time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: real() + ahead_s[0])
    monkeypatch.setattr(lent.tier._manager, "reserve", lambda planned: None)
    lent.submit(keys(1, "a"), [0], is_load=False)
    ahead_s[0] = 6.0
    later = lent.submit(keys(1, "b"), [1], is_load=False)
    ahead_s[0] = 12.0
    lent.tier._start_stores()
    assert [store.job.job_id for store in lent.tier._queue] == [later]


def test_a_job_that_finds_room_now_and_then_does_not_keep_its_rows_for_longer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent, real, ahead_s = make(), time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: real() + ahead_s[0])
    reserve, num_asked = lent.tier._manager.reserve, [0]

    def every_other_time(planned: Any) -> Any:
        num_asked[0] += 1
        return reserve(planned) if num_asked[0] % 2 else None

    monkeypatch.setattr(lent.tier._manager, "reserve", every_other_time)
    lent.submit(keys(20), range(20), is_load=False)
    for _ in range(4):
        ahead_s[0] += module.ROOM_S / 2
        lent.tier._start_stores()
    assert not lent.tier._queue


def test_limits_hold_over_two_engines_and_a_restart(make: Make, tmp_path: Path) -> None:
    capacity = 40 * ROW_BYTES
    for life in range(2):
        both = [make(capacity_bytes=capacity) for _ in range(2)]
        for number in range(10):
            for which, lent in enumerate(both):
                lent.fill(range(4), number)
                lent.store(keys(4, f"prompt {life} {which} {number}"), range(4))
                assert bytes_under(tmp_path / "root") <= capacity
        assert both[0].tier._manager.usage().capacity_bytes <= capacity
        for lent in both:
            lent.shutdown()
    assert objects(tmp_path)


@pytest.mark.faults
def test_twenty_kills() -> None:
    """In a process of its own, as the command is: it changes the module under test."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.offloading.crash", "--kills", "20"], capture_output=True, text=True, check=False
    )
    assert "all restored, none wrong" in done.stdout, done.stderr[-3000:]


def test_limits_hold(make: Make, tmp_path: Path) -> None:
    capacity = 40 * ROW_BYTES
    lent = make(capacity_bytes=capacity)
    for number in range(20):
        lent.fill(range(4), number)
        lent.store(keys(4, f"prompt {number}"), range(4))
        assert bytes_under(tmp_path / "root") <= capacity
    assert any(lent.has(key) for key in keys(4, "prompt 19"))
    assert not any(lent.has(key) for key in keys(4, "prompt 0"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"capcity_bytes": 1}, "did you mean capacity_bytes?"),
        ({"hybrid_chunk_size": 64}, "hybrid_chunk_size"),
        ({"eviction_policy": "learned"}, "eviction_policy"),
        ({"root": "s3://bucket"}, "root"),
        ({"capacity_bytes": 1}, "set it to at least"),
    ],
)
def test_what_it_does_not_take_is_refused(make: Make, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        make(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"capcity_bytes": 1}, "did you mean capacity_bytes?"),
        ({"spec_name": None}, '"spec_name": "TieringOffloadingSpec"'),
        ({"spec_name": "CPUOffloadingSpec"}, '"spec_name": "TieringOffloadingSpec"'),
        ({"twice": True}, "give one of them"),
        ({"backpressure": {}, "read_threads": 0}, "read_threads=0"),
        ({"backpressure": {}}, ""),
    ],
)
@pytest.mark.parametrize("is_child", [False, True])
def test_settings_are_checked_before_weights_are_read(given: dict[str, Any], words: str, is_child: bool) -> None:
    """As the disk tier's are: by vLLM's call when it makes its configuration, or by our MultiConnector."""
    given, extra = dict(given), dict[str, Any](cpu_bytes_to_use=1 << 30)
    if spec_name := given.pop("spec_name", "TieringOffloadingSpec"):
        extra["spec_name"] = spec_name
    entries = [{"type": "hybrid_disk", "root": "/kv", **given}] * (1 + given.pop("twice", False))
    config: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "secondary_tiers": entries},
    }
    if is_child:
        config = multi(config)
    plugin.register()
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**config),
        cache_config=SimpleNamespace(kv_offloading_size=None),
        lora_config=None,
        speculative_config=None,
    )
    if not words:
        return check(vllm_config)
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(vllm_config)


def test_it_counts_what_it_stores_loads_and_gives_up(make: Make, tmp_path: Path) -> None:
    lent, names, counted = make(), keys(3), collections.Counter[str]()
    lent.fill(range(3))
    lent.store(names, range(3))
    until(lambda: len(objects(tmp_path)) == 3)
    flip(objects(tmp_path)[:1])
    lent.load(names, range(10, 13))
    stats = lent.tier.get_stats()
    assert stats is not None
    assert lent.tier.get_stats() is None  # nothing has changed
    assert set(stats.data["data"]) <= set(HybridDiskTier.build_metric_definitions({}))
    for name, series in stats.data["data"].items():
        for labels, value in series.items():
            assert labels[0] == "hybrid_disk"
            counted[" ".join([name.removeprefix("vllm:hybrid_offload_"), *labels[1:]])] += (
                len(value) if isinstance(value, list) else value
            )
    assert counted["stored_objects"] == counted["store_seconds"] == 3
    assert counted["stored_bytes"] == 3 * ROW_BYTES
    assert (counted["loaded_objects"], counted["loaded_bytes"]) == (2, 2 * ROW_BYTES)
    assert counted["failed_loads checksum"] == 1
    assert (counted["pending_stores"], counted["pending_loads"]) == (0, 0)
    assert counted["chunk_tokens"] == 64


def test_its_counters_are_there_before_anything_is_counted(tmp_path: Path) -> None:
    """Of a counter that begins with its first failure, an alert sees no increase."""
    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    tiers = [{"type": "hybrid_disk", "root": str(tmp_path / "root")}]
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": tiers}
    config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    vllm_config: Any = SimpleNamespace(kv_transfer_config=config)
    plugin.register()
    OffloadingConnector.build_prom_metrics(vllm_config, kinds, ["engine"], {0: ["0"], 1: ["1"]})
    for engine in "01":
        labels = {"engine": engine, "connector": "hybrid_disk"}
        for reason in FAILED_LOADS:
            name = "vllm:hybrid_offload_failed_loads_total"
            assert registry.get_sample_value(name, {**labels, "reason": reason}) == 0
        assert registry.get_sample_value("vllm:hybrid_offload_stored_objects_total", labels) == 0


def test_without_a_tier_of_ours_vllms_metrics_are_left_alone() -> None:
    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    extra = {"cpu_bytes_to_use": 1 << 30}
    config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    vllm_config: Any = SimpleNamespace(kv_transfer_config=config)
    OffloadingConnector.build_prom_metrics(vllm_config, kinds, ["engine"], {0: ["0"]})
    assert not [metric.name for metric in registry.collect() if metric.name.startswith("vllm:hybrid_offload")]


def test_without_an_engine_it_is_refused() -> None:
    with pytest.raises(ConfigError, match='set "kv_connector": "OffloadingConnector"'):
        engine_being_built()


@pytest.mark.parametrize(
    ("change", "flag"), [({"lora_config": object()}, "--enable-lora"), ({"speculative_config": object()}, "--spec")]
)
def test_what_names_of_chunks_do_not_say_is_refused(change: dict[str, Any], flag: str, tmp_path: Path) -> None:
    from vllm_overlay.offloading.namespace import namespace_of

    cache = SimpleNamespace(prefix_caching_hash_algo="sha256")
    config = SimpleNamespace(**{"lora_config": None, "speculative_config": None, "cache_config": cache, **change})
    engine: Any = SimpleNamespace(vllm_config=config)
    offloading: Any = SimpleNamespace(parallel=None)
    with pytest.raises(ConfigError, match=flag):
        namespace_of(engine, offloading, 4096, "", tmp_path, {})
    plugin.register()
    disk = {"type": "hybrid_disk", "root": "/kv", "capacity_bytes": "10GiB"}
    for tiers in ([], [disk]):  # and before weights are read
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": tiers}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
        with pytest.raises(ConfigError, match=flag) if tiers else contextlib.nullcontext():
            check(engine.vllm_config)
