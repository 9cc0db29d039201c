# SPDX-License-Identifier: Apache-2.0
"""What every process does before one of our connectors is built in it: the patch check, and a voice in vLLM's log."""

import functools
import logging

from vllm_overlay.patching import installed

logger = logging.getLogger(__name__)


@functools.cache
def prepare_process() -> None:
    """Logs vLLM's version and what is applied; raises UnpatchedError, whose sentence names the command to run."""
    _log_like_vllm()
    logger.info("vllm-overlay: %s", installed.require())


def _log_like_vllm() -> None:
    """vLLM sets up the logger ``vllm`` only; ours gets the same handlers and level."""
    ours, theirs = logging.getLogger("vllm_overlay"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
