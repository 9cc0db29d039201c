# SPDX-License-Identifier: Apache-2.0
"""Imports what a process of vLLM imports before it builds an engine, and nothing of ours. See ``tests/warm.py``.

numba is not among it: the start of an engine on a CPU fails in a process that has imported it before
(``_rebind_kernels`` in ``vllm/triton_utils/dispatcher.py`` asks every object of every module for its attributes).
"""

# ruff: noqa: E402
import atexit
import gc
import os
from typing import Any

_BEFORE = dict(os.environ)
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # read on import: standard output is for answers

import aiohttp  # noqa: F401
import fastapi  # noqa: F401
import openai.types.responses  # noqa: F401
import sympy  # noqa: F401
import torch._dynamo
import torch._inductor.standalone_compile  # noqa: F401
import torchvision  # noqa: F401
import vllm.entrypoints.llm
import vllm.lora.request
import vllm.model_executor.models.qwen3_5
import vllm.v1.engine.core
import vllm.v1.metrics.reader
import vllm.v1.worker.cpu_worker  # noqa: F401
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel  # noqa: F401
from vllm.platforms.cpu import CpuPlatform

SET_ON_IMPORT = {name: value for name, value in os.environ.items() if _BEFORE.get(name) != value}
"""Variables that imports have set. A forked process, which gets an environment of its own, has them too."""

_check = CpuPlatform.check_and_update_config


def _ranks_are_forked(_: type[CpuPlatform], vllm_config: Any) -> None:
    """As on a GPU. On a CPU vLLM spawns engines and ranks, and each would import all this again."""
    _check(vllm_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = classmethod(_ranks_are_forked)

gc.freeze()  # what is here stays: no collection of a process forked from this one need look at it, nor copy its pages
gc.unfreeze = lambda: None  # vLLM does so before it ends, and would look through all of it twice: two seconds an engine
atexit.register(os._exit, 0)  # and the process itself ends without asking what triton thinks of it
