# SPDX-License-Identifier: Apache-2.0
"""The poison fuzz: a few seeds of each column, seeds that once were wrong, and that the oracle notices what is broken.

``make test SUITE=poison`` runs five hundred seeds of each column.
"""

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from devtools import poison_fuzz
from devtools.poison import worker
from devtools.poison.memory import POISON, Memory, Prefixes
from devtools.poison.seed import COLUMNS, run_seed
from devtools.poison.worker import Worker

BY_NAME = poison_fuzz.BY_NAME
NUM_SEEDS = 6
ONCE_WRONG = {
    "attention-sync-plain-block": (220, 296),
    "attention-sync-aborts-block": (6, 20, 54),
    "attention-sync-few-block": (336, 385),
    "attention-async-plain-block": (4, 5, 7),
    "attention-async-aborts-block": (3, 5, 7),
    "attention-async-few-block": (3, 6, 54),
    "attention-async-late-block": (6, 7, 8),
    "attention-sync-late-block": (27,),
    "hybrid-sync-late-block": (10, 13),
    "hybrid-sync-late-below": (12,),
    "hybrid-async-late-block": (6, 10),
    "hybrid-async-late-below": (8, 9),
    "hybrid-sync-plain-block": (25,),
    "hybrid-sync-plain-below": (8, 23),
    "hybrid-sync-aborts-block": (17, 33),
    "hybrid-sync-aborts-below": (7, 101),
    "hybrid-sync-few-below": (35, 296, 949),
    "hybrid-async-plain-below": (9, 12, 57, 179, 830),
    "hybrid-async-aborts-block": (1,),
    "hybrid-async-aborts-below": (13, 98),
    "hybrid-async-few-block": (446,),
    "hybrid-async-few-below": (3, 113, 396),
    "hybrid-sync-priorities-below": (1147,),
    "hybrid-sync-drafts-block": (314,),
    "hybrid-sync-checkpoints-block": (15,),
    "hybrid-sync-checkpoints-below": (6, 49),
    "hybrid-async-checkpoints-below": (66,),
}
"""Before the patches were as they are, or while they were made."""


def wrong_seeds(name: str, seeds: range, may_fail: bool = True) -> dict[int, str]:
    verdicts = {seed: run_seed(seed, BY_NAME[name], may_fail).problem for seed in seeds}
    return {seed: problem for seed, problem in verdicts.items() if problem}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_no_seed_is_wrong(column):
    seeds = (*range(NUM_SEEDS), *ONCE_WRONG.get(column.name, ()))
    verdicts = {seed: run_seed(seed, column) for seed in seeds}
    assert {seed: verdict.problem for seed, verdict in verdicts.items() if verdict.problem} == {}
    assert sum(verdict.num_failed_loads for verdict in verdicts.values()) > 0


@pytest.mark.parametrize("name", ["attention-async-few-block", "hybrid-sync-few-block", "hybrid-async-aborts-below"])
def test_nothing_is_wrong_and_nothing_fails_when_all_loads_succeed(name):
    verdicts = [run_seed(seed, BY_NAME[name], may_fail=False) for seed in range(10)]
    assert [(verdict.problem, verdict.num_failed_loads, verdict.num_errors) for verdict in verdicts] == [
        ("", 0, 0)
    ] * 10


def test_a_seed_is_the_same_each_time():
    first, second = (run_seed(33, BY_NAME["hybrid-async-few-below"], verbose=True) for _ in range(2))
    assert first.trace[2:] == second.trace[2:]


def test_the_oracle_notices_states_that_are_copied_before_they_are_loaded(monkeypatch):
    monkeypatch.setattr(worker, "COPIES_AFTER_LOADS", False)
    assert wrong_seeds("hybrid-sync-plain-block", range(20), may_fail=False)
    assert not wrong_seeds("attention-sync-plain-block", range(20), may_fail=False)


@pytest.mark.parametrize("name", ["attention-sync-plain-block", "hybrid-async-plain-block"])
def test_the_oracle_notices_a_forgotten_eviction(name, monkeypatch):
    monkeypatch.setattr(KVCacheManager, "evict_prefix", lambda *arguments: None)
    assert any("poison" in problem for problem in wrong_seeds(name, range(20)).values())


def test_the_oracle_notices_requests_that_go_on_with_what_a_failed_load_left(monkeypatch):
    monkeypatch.setattr(Scheduler, "_restart", lambda self, req_ids: set())
    assert any("poison" in problem for problem in wrong_seeds("hybrid-sync-plain-block", range(20)).values())


@pytest.mark.parametrize("name", ["hybrid-sync-drafts-block", "hybrid-sync-drafts-below"])
def test_the_oracle_notices_a_state_that_accepted_drafts_have_passed_and_nobody_kept(name, monkeypatch):
    monkeypatch.setattr(Worker, "_keep_boundary", lambda *arguments: None)
    assert any("offered" in problem for problem in wrong_seeds(name, range(20)).values())


def test_the_oracle_notices_a_state_that_is_offered_when_its_block_is_another_request_s(monkeypatch):
    take = MambaManager.take_pending_boundary_state_offloads
    with_any_hash = lambda self: [(*offer[:4], offer[2].block_hash) for offer in take(self)]  # noqa: E731
    monkeypatch.setattr(MambaManager, "take_pending_boundary_state_offloads", with_any_hash)
    assert any("offered" in problem for problem in wrong_seeds("hybrid-async-drafts-block", range(6)).values())


def test_the_oracle_notices_blocks_that_are_never_freed(monkeypatch):
    monkeypatch.setattr(Scheduler, "_free_request_blocks", lambda self, request: None)
    problems = wrong_seeds("attention-sync-plain-block", range(5), may_fail=False)
    assert len(problems) == 5


def test_the_oracle_notices_a_scheduler_that_stands_still(monkeypatch):
    monkeypatch.setattr(Scheduler, "_handle_blocked_waiting_request", lambda self, request: False)
    assert "hangs" in wrong_seeds("attention-sync-plain-block", range(1))[0]


def test_blocks_hold_what_was_written_last():
    memory, prefixes = Memory(), Prefixes()
    chain = prefixes.chain([7, 8])
    assert prefixes.chain([7, 8, 9])[:3] == chain
    assert prefixes.chain([8])[1] not in chain
    memory.write_slot(1, 0, chain[1])
    memory.write_state(2, chain[2])
    memory.copy([(1, 2), (2, 3)])
    assert (memory.slot(2, 0), memory.state(2), memory.state(3)) == (chain[1], POISON, chain[2])
    memory.write_slot(3, 0, chain[1])
    memory.clear(1)
    assert (memory.state(3), memory.slot(3, 0), memory.slot(1, 0)) == (POISON, chain[1], POISON)


def test_the_command_prints_a_table_and_the_steps_of_one_seed(capfd):
    assert poison_fuzz.main(["--seeds", "2", "--column", "attention-sync"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines if line.startswith("| attention")] == ["0 of 2"] * 14
    assert poison_fuzz.main(["--column", "attention-sync-plain-block", "--seed", "1", "--verbose"]) == 0
    assert "all is well" in capfd.readouterr().out


def test_the_command_fails_and_names_the_seed_when_one_is_wrong(capfd, monkeypatch):
    monkeypatch.setattr(worker, "COPIES_AFTER_LOADS", False)
    assert poison_fuzz.main(["--seeds", "20", "--column", "hybrid-sync-plain-block"]) == 1
    assert "--column hybrid-sync-plain-block --seed " in capfd.readouterr().out


def test_an_unknown_column_is_refused_with_those_that_are_known(capfd):
    with pytest.raises(SystemExit) as end:
        poison_fuzz.main(["--column", "nonsense"])
    assert end.value.code == 2
    assert "attention-sync-plain-block" in capfd.readouterr().err
