# SPDX-License-Identifier: Apache-2.0
"""A load of somebody else's connector fails: by default it costs time, and a request where an operator says so."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import multi, prompt
from tests.engine.states import FLOAT32
from tests.http.warm_server import WarmServer
from tests.python_path import python_path
from tests.waiting import until
from vllm_overlay.server.api_client import ApiError

pytestmark = [pytest.mark.engine, pytest.mark.faults]

LENGTH = 2400
ATTEMPTS = 3
"""``max_load_attempts`` of a child that does not set it."""


def failing_child(**entry: Any) -> dict[str, Any]:
    """vLLM's OffloadingConnector: every load of it fails, and leaves noise behind."""
    return {
        "kv_connector": "FailingOffloadingConnector",
        "kv_connector_module_path": "tests.multi_connector.third_party",
        "kv_connector_extra_config": {
            "spec_name": "GarbageTiering",
            "spec_module_path": "tests.multi_connector.third_party",
            "cpu_bytes_to_use": 128 << 20,
        },
        **entry,
    }


def server(model: Path, tmp_path: Path, **entry: Any) -> WarmServer:
    return WarmServer(
        model,
        multi(failing_child(**entry)),
        log_path=tmp_path / "server.log",
        arguments=FLOAT32.flags,
        environment={"PYTHONPATH": python_path()},
    )


def policy_lines(tmp_path: Path) -> list[str]:
    return [line for line in (tmp_path / "server.log").read_text().splitlines() if "kv_load_failure_policy is" in line]


def test_without_a_setting_the_request_is_recomputed(tiny_model: Path, tmp_path: Path) -> None:
    tokens = prompt(LENGTH, seed=1)
    with server(tiny_model, tmp_path) as api:
        cold = api.complete(tokens)
        api.reset_prefix_cache()
        again = api.complete(tokens)
        metrics = api.settled_metrics()
    assert again.same_as(cold)
    assert again.num_cached_tokens == 0
    failed = metrics.values("vllm:kv_connector_failed_loads_total", "connector")
    assert failed == {"FailingOffloadingConnector": ATTEMPTS}
    (line,) = policy_lines(tmp_path)
    assert "kv_load_failure_policy is 'recompute' for all connectors of the MultiConnector" in line


def test_where_an_operator_says_fail_that_request_fails_and_no_other(tiny_model: Path, tmp_path: Path) -> None:
    stored, new = prompt(LENGTH, seed=1), prompt(LENGTH, seed=2)
    with server(tiny_model, tmp_path, kv_load_failure_policy="fail") as api:
        api.complete(stored)
        api.reset_prefix_cache()
        with pytest.raises(ApiError):
            api.complete(stored)
        cold = api.complete(new)
        assert api.complete(new).same_as(cold)
        until(api.is_healthy, "the server's answer")
    (line,) = policy_lines(tmp_path)
    assert "kv_load_failure_policy is 'fail'" in line
    assert "connector FailingOffloadingConnector says so" in line
