# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on vLLM's CPU build, which switches it off: the scheduler and the model runner of a GPU's.

vLLM plans step k + 1 before it takes in what step k has answered, and its runner hands tokens from step to step by
itself. On a CPU every pass has ended when its call returns; that is all that differs from a GPU.
"""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


def force() -> None:
    """Before the engine is made; for good, so in a process of its own."""
    check = CpuPlatform.check_and_update_config

    def check_and_update_config(_: type[CpuPlatform], vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
