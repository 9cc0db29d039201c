# SPDX-License-Identifier: Apache-2.0
"""Small files that readers see whole."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Gives ``path`` the content, with mode 0600: a reader sees the old bytes or the new ones, never a part of them.

    Its directory must exist. Raises OSError; then nothing has changed. Nothing is synced: after a crash the file may be
    the old one.
    """
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.absolute().parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
