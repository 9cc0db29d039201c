# SPDX-License-Identifier: Apache-2.0
"""What is refused, as vLLM's own server refuses it: before it reads a weight, in a sentence at the end of its log."""

import shutil
from pathlib import Path

import pytest

from tests.engine.client import cpu_child, multi
from tests.http.warm_server import WarmServer
from tools.server_process import ServerError

pytestmark = pytest.mark.engine


def test_the_flag_of_vllms_own_offloading_beside_ours_ends_a_server_that_has_no_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    model, log = tmp_path / "model", tmp_path / "server.log"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors*"))
    flag = ["--kv-offloading-size", "1"]
    with (
        pytest.raises(ServerError, match="--kv-offloading-size 1 would put vLLM's own connector in the place of"),
        WarmServer(model, multi(cpu_child()), log_path=log, arguments=flag),
    ):
        pass
    assert "EngineCore" not in log.read_text()  # which would look for the weights
