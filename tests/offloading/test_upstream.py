# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its fs tier (0.32.0), unchanged, with ours in its place (upstream_shim.py).

They are in vLLM's source distribution alone: VLLM_SOURCE names one that is unpacked.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import python_path

TESTS = Path("tests/v1/kv_offload/tiering/test_fs_tier.py")
NUM_PASSING = 25
_EVENTS, _LOCALITY = "ours publishes no KV events", "ours has no setting locality"
_STAYS = "what does not verify is hidden until it is stored anew, and not removed"
KNOWN = {
    "test_invalid_path_raises_at_construction": "a ConfigError that names the root, and no OSError",
    "test_invalid_locality_raises_at_construction": _LOCALITY,
    "test_factory_forwards_locality_to_fs_tier": _LOCALITY,
    "test_shutdown_discards_pending_tasks": "about the fs tier's own queues",
    "test_store_load_roundtrip_without_o_direct": "about the fs tier's own io module",
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": _STAYS,
    "test_batched_load_first_block_fails_marks_whole_batch": "what is right behind a bad first file is loaded",
    "test_successful_store_emits_stored_event": _EVENTS,
    "test_store_event_uses_configured_locality": _EVENTS,
    "test_mixed_job_results_emit_event_only_for_successful_job": _EVENTS,
    "test_partially_failed_store_emits_no_event": _EVENTS,
    "test_events_disabled_by_default": _EVENTS,
    "test_events_require_global_kv_events_flag": _EVENTS,
    "test_cascade_store_emits_fs_event_through_tiering_manager": _EVENTS,
    "test_fs_tier_cross_tp_round_trip": "ranks are a fact of the namespace",
}
"""What fails with ours in its place, and why."""


@pytest.mark.upstream
def test_vllms_own_tests_of_a_secondary_tier_pass_with_ours_in_the_fs_tiers_place(tmp_path: Path) -> None:
    (tmp_path / TESTS).parent.mkdir(parents=True)
    shutil.copy(Path(os.environ["VLLM_SOURCE"]) / TESTS, tmp_path / TESTS)
    (tmp_path / "shim").mkdir()  # alone in a directory: beside it lies our own package "tests"
    shutil.copy(Path(__file__).with_name("upstream_shim.py"), tmp_path / "shim")
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path / "shim"), "VLLM_PLUGINS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "upstream_shim", "-p", "no:cacheprovider", "-q", "-rA"]
    command += ["-c", os.devnull, f"--rootdir={tmp_path}", "--noconftest", str(tmp_path / TESTS)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", ran.stdout, flags=re.MULTILINE)
    failed = {test for outcome, test in outcomes if outcome != "PASSED"}
    assert failed == set(KNOWN), ran.stdout[-8000:]
    assert sum(outcome == "PASSED" for outcome, _ in outcomes) == NUM_PASSING, ran.stdout[-8000:]
