# SPDX-License-Identifier: Apache-2.0
"""The copy kernel computes what a loop does (in Triton's interpreter), and compiles for GPUs. None runs it here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_overlay.transfer import copy_kernel

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_interpreted_kernel() -> None:
    """In a process of its own: Triton reads the variable when the kernel's module is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/transfer/interpreted.py"],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("vector_bytes", [16, 8, 4, 2, 1])
def test_the_kernel_compiles_and_moves_whole_vectors(vector_bytes: int, capability: int) -> None:
    """Down to machine code, which needs no GPU; its loads and stores are as wide as the vectors."""
    constants = copy_kernel.variant(vector_bytes, only_clear=False)
    source = ASTSource(
        fn=copy_kernel._copy_kernel,
        signature={"table": "*i64", "num_copies": "i32", **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    width = "v2.b64" if vector_bytes == 16 else f"b{8 * vector_bytes}"
    assert len(compiled.asm["cubin"]) > 1000
    assert set(re.findall(r"st\.global\.([\w.]+)", compiled.asm["ptx"])) == {width}
    assert set(re.findall(r"ld\.global\.([\w.]+)", compiled.asm["ptx"])) == {width, "b64"}
