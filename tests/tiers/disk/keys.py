# SPDX-License-Identifier: Apache-2.0
"""Key files."""

from pathlib import Path

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))


def make_key(path: Path, content: bytes = SECRET) -> str:
    """A private file with these bytes."""
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)
