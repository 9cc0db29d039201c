# SPDX-License-Identifier: Apache-2.0
"""Every patch is needed: its reproduction shows the symptom on a vLLM without it, and none on the patched one.

A reproduction is ``reproductions/<name of the patch with underscores>.py``: a script that ends by printing a JSON
object with ``symptom`` and ``healthy``, and has a constant SYMPTOM in words. It runs in a process of its own and says
which vLLM it had: the installed one, which has the series, or a hard-linked copy without the patch, which is then first
on its path; bytecode is linked too, but for the files that differ.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patches.trees import linked_vllm_without
from tests.python_path import python_path
from tests.warm import WarmProcess
from vllm_overlay.patching.installed import installed_root, require
from vllm_overlay.patching.replace import replace_files
from vllm_overlay.patching.series import load

REPRODUCTIONS = Path(__file__).parent / "reproductions"
NAMES = load().patches
ABOUT_BLOCKS = ("0002-", "0007-", "0008-", "0009-", "0010-", "0012-", "0021-")
"""Their reproductions count in blocks: they failed on lesser processors until ``Lab`` said which states it means."""
NEEDS_BF16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM takes another convolution on this processor"
)
MARKS = {**dict.fromkeys(ABOUT_BLOCKS, pytest.mark.processor), "0023-": NEEDS_BF16}
CASES = [pytest.param(name, marks=MARKS.get(name[:5], ())) for name in NAMES]


def reproduction_of(name: str) -> Path:
    return REPRODUCTIONS / (name.removesuffix(".patch").replace("-", "_") + ".py")


def run(reproduction: Path, root: Path | None, home: Path, model: Path) -> dict[str, object]:
    """Without a ``root`` it has the installed vLLM, imported already, which must have this series."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(*([root] if root else [])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "TINY_MODEL": str(model),
        "TORCHDYNAMO_DISABLE": "1",  # or the first request compiles, for two seconds, how logprobs are ranked
    }
    log = home / "log"
    if root is None:
        require()
        with WarmProcess([str(reproduction)], environment, home, log) as process:
            said, status = process.stdout.read(), process.wait()
    else:
        with log.open("wb") as errors:
            command = [sys.executable, str(reproduction)]
            done = subprocess.run(command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        said, status = done.stdout, done.returncode
    assert status == 0, log.read_text(errors="replace")[-4000:]
    last: dict[str, object] = json.loads(said.strip().splitlines()[-1])
    assert str(last.pop("vllm")).startswith(str(root or installed_root())), (last, root)
    return last


LOADING = """\
                    # KVTransfer: loading remote KV, do not allocate for new work.
                    assert num_external_computed_tokens > 0
                    num_new_tokens = 0
"""
SPLIT = """\
                    num_new_tokens = self._mamba_block_aligned_split(
                        request,
                        num_new_tokens,
                        num_new_local_computed_tokens,
                        num_external_computed_tokens,
                    )
                    if num_new_tokens == 0:
                        break
"""


def test_every_patch_has_a_reproduction_and_every_reproduction_a_patch():
    assert {reproduction_of(name) for name in NAMES} == set(REPRODUCTIONS.glob("[0-9]*.py"))


@pytest.fixture
def scratch(tmp_path):
    """A directory that does not outlive the test: a copy of vLLM holds some 6,000 files."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.patches
@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_the_symptom_is_there_without_the_patch_and_gone_with_it(name, scratch, tiny_model):
    reproduction = reproduction_of(name)
    symptom = runpy.run_path(str(reproduction), run_name="description")["SYMPTOM"]
    without = run(reproduction, linked_vllm_without(name, scratch / "without"), scratch, tiny_model)
    assert without["symptom"], f"not seen without {name}: {symptom}; {without}"
    with_it = run(reproduction, None, scratch, tiny_model)
    assert with_it["healthy"], f"still seen with {name}: {symptom}; {with_it}"


@pytest.mark.patches
@pytest.mark.engine
def test_asynchronous_loads_are_left_out_of_the_split_at_block_boundaries(scratch, tiny_model):
    """Merged upstream: it needs no patch, and must not get lost when the pin moves."""
    reproduction = REPRODUCTIONS / "async_loads_skip_the_alignment.py"
    assert run(reproduction, None, scratch, tiny_model)["healthy"]
    root = linked_vllm_without("", scratch / "split")
    path = "vllm/v1/core/sched/scheduler.py"
    scheduler = (root / path).read_text()
    assert scheduler.count(LOADING) == 1
    replace_files(root, {path: scheduler.replace(LOADING, LOADING + SPLIT).encode()})
    assert run(reproduction, root, scratch, tiny_model)["symptom"]
