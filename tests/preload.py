# SPDX-License-Identifier: Apache-2.0
"""Imports what takes longest of all that vLLM imports, and nothing of vLLM's or ours. See ``tests/warm.py``."""

import atexit
import gc
import os

import aiohttp  # noqa: F401
import fastapi  # noqa: F401
import openai.types.responses  # noqa: F401
import sympy  # noqa: F401
import torch._dynamo
import torch._inductor.standalone_compile  # noqa: F401
import torchvision  # noqa: F401
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel  # noqa: F401

gc.freeze()  # what is here stays: no collection of a process forked from this one need look at it, nor copy its pages
atexit.register(os._exit, 0)  # and the process itself ends without asking what triton thinks of it
