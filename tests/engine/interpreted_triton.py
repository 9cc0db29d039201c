# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter in the place of triton-cpu, which vLLM's V2 model runner wants on a CPU.

triton-cpu is on no package index. The runner's own kernels (block tables, input batch, sampling) are small, so the
interpreter is fast enough; attention and GDN are vLLM's C++ kernels for CPUs, as with the V1 runner.
"""

import os
from typing import Any

V2_RUNNER: dict[str, Any] = {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "launcher": ("env",)}
"""Arguments of ``Engine``. Its process is not a warm one: Triton must be imported after ``install``."""


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver


def install() -> None:
    """Before vLLM is imported; for good, so in a process of its own."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = _Backend
