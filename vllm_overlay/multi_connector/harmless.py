# SPDX-License-Identifier: Apache-2.0
"""A fence for what a child hands over outside its hooks: its stats, metrics and events. A fault is logged once."""

import contextlib
import functools
from collections.abc import Iterator

from vllm.logger import init_logger

from vllm_overlay.common.fence import SHUTDOWN

logger = init_logger(f"vllm.{__name__}")


@functools.cache
def log_once(message: str) -> None:
    """Called while an exception is handled. Logs it with its traceback, each message once in a process."""
    logger.exception(message)


@contextlib.contextmanager
def harmless(message: str) -> Iterator[None]:
    """What raises inside is logged once and left out. A shutdown passes."""
    try:
        yield
    except SHUTDOWN:
        raise
    except BaseException:
        log_once(message)
