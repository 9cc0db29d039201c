# SPDX-License-Identifier: Apache-2.0
"""The check that every process makes before one of our connectors is built in it."""

import functools

from vllm.logger import init_logger

from vllm_overlay import patch_series

logger = init_logger("vllm." + __name__)


@functools.cache
def require_patched_vllm() -> None:
    """Logs vLLM's version and what is applied; raises UnpatchedError, whose sentence names the command to run."""
    logger.info("vllm-hybrid-offload: %s", patch_series.require())
