# SPDX-License-Identifier: Apache-2.0
"""What a fence around foreign code lets through: only a shutdown of the process.

Native code raises what is no ``Exception``: a panic of a Rust extension, ``asyncio.CancelledError``. So a fence is

    try:
        hook()
    except SHUTDOWN:
        raise
    except BaseException as error:
        ...
"""

SHUTDOWN = (KeyboardInterrupt, SystemExit)
"""Raised when the process is to end. Every other exception is a fault of the code that raised it."""
