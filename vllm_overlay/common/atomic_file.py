# SPDX-License-Identifier: Apache-2.0
"""Replaces a small file as a whole: a reader sees the old bytes or the new ones, never a part of them."""

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Gives ``path`` the content, with mode 0600. Its directory must exist. Raises OSError; then nothing has changed.

    Nothing is synced: after a crash the file may be the old one.
    """
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
