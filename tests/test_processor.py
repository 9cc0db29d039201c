# SPDX-License-Identifier: Apache-2.0
"""``make test PROCESSOR=avx2``: every process of vLLM believes it runs on a lesser processor, and chooses by that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import BFLOAT16, STATES, States
from tests.processor.sitecustomize import HIDDEN, VARIABLE, without
from tests.python_path import REPOSITORY, python_path
from tools.server import Server

KERNELS = {"avx2": "_C_AVX2", "avx512": "_C_AVX512", "avx512_bf16": "_C"}
"""The library of compiled kernels that vLLM takes on each processor."""
LOADED = """
from vllm.platforms import current_platform
current_platform.import_kernels()
print(sorted({line.split("/")[-1].split(".")[0] for line in open("/proc/self/maps") if "/vllm/_C" in line}))
"""

COMPILED = """
import torch
numbers = torch.arange(256, dtype=torch.int32)
assert torch.equal(torch.compile(lambda each: each.long() * (each > 3), dynamic=True)(numbers), numbers * (numbers > 3))
"""


def lesser(processor: str) -> dict[str, str]:
    """The environment that ``make`` gives to everything it runs then."""
    return {"PYTHONPATH": python_path(REPOSITORY / "tests" / "processor"), VARIABLE: processor}


def kernels_of(processor: str | None) -> str:
    """The library that vLLM takes for ``processor`` on this machine, which may have less."""
    machine = torch._C._cpu._get_cpu_capability()  # what torch.cpu would say if nothing were hidden
    here = "avx512_bf16" if machine.get("avx512_bf16") else "avx512" if machine.get("avx512_f") else "avx2"
    return KERNELS[min(processor or here, here, key=list(HIDDEN).index)]


def kernels_in(pid: int) -> set[str]:
    """Those that a process has loaded; empty when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except FileNotFoundError:
        return set()
    return {line.rsplit("/", 1)[-1].partition(".")[0] for line in lines if "/vllm/_C" in line}


def run(source: str, processor: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **lesser(processor), **more}
    return subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)


def test_what_a_processor_lacks_is_hidden_and_the_rest_is_not() -> None:
    machine = {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_tile": True}
    seen = {processor: dict(without(machine, hidden)) for processor, hidden in HIDDEN.items()}
    assert seen["avx2"] == {**machine, "avx512_f": False, "avx512_bf16": False, "amx_tile": False}
    assert seen["avx512"] == {**machine, "avx512_bf16": False, "amx_tile": False}
    assert seen["avx512_bf16"] == {**machine, "amx_tile": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "processor", ["avx2", *(pytest.param(other, marks=pytest.mark.engines) for other in HIDDEN if other != "avx2")]
)
def test_vllm_takes_the_kernels_of_that_processor(processor: str) -> None:
    done = run(LOADED, processor)
    assert done.stdout.splitlines()[-1:] == [str([kernels_of(processor)])], done.stderr


@pytest.mark.engines
def test_what_torch_has_compiled_for_one_processor_is_not_taken_for_another(tmp_path: Path) -> None:
    for processor in ("avx512_bf16", "avx2"):
        done = run(COMPILED, processor, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr


def test_a_processor_that_nobody_knows_ends_the_process() -> None:
    done = run("print('went on')", "z80")
    assert done.returncode == 1 and not done.stdout
    assert "z80: known are avx2, avx512, avx512_bf16" in done.stderr


@pytest.mark.engine
@pytest.mark.processor
@pytest.mark.parametrize("states", STATES, ids=str)
def test_an_engine_of_the_tests_is_told_too_and_finds_the_blocks_that_tests_count_in(
    tiny_model: Path, tmp_path: Path, states: States
) -> None:
    """As users start it, without a block size."""
    config = multi(cpu_child())
    tokens = prompt(states.block_size + 10, seed=1)
    with Engine(tiny_model, mamba_ssm_cache_dtype=states.dtype, kv_transfer_config=config) as engine:
        assert kernels_in(engine.pid) == {kernels_of(os.environ.get(VARIABLE))}
        assert f"Setting attention block size to {states.block_size} tokens" in engine.log
        cold = engine.generate(tokens)
        engine.reset_device_cache()
        assert_restored(cold, engine.generate(tokens), len(tokens))


@pytest.mark.engines
@pytest.mark.engine
def test_every_process_of_a_server_is_told_alike_and_states_are_halved(tiny_model: Path, tmp_path: Path) -> None:
    server = Server(tiny_model, None, log_path=tmp_path / "log", environment=lesser("avx2"))
    with server:
        assert server.group is not None
        kernels = [found for pid in server.group.pids if (found := kernels_in(pid))]
    assert kernels and all(found == {"_C_AVX2"} for found in kernels), kernels
    assert f"Setting attention block size to {BFLOAT16.block_size} tokens" in (tmp_path / "log").read_text()
