# SPDX-License-Identifier: Apache-2.0
"""What can happen to files of the disk tier."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path


def flip(paths: Sequence[Path]) -> None:
    """One bit in the middle of each."""
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


def truncate(paths: Sequence[Path]) -> None:
    for path in paths:
        os.truncate(path, path.stat().st_size - 1)


def extend(paths: Sequence[Path]) -> None:
    for path in paths:
        os.truncate(path, path.stat().st_size + 4096)


def swap(paths: Sequence[Path]) -> None:
    """Those of one size change their contents in a ring."""
    sizes = {path: path.stat().st_size for path in paths}
    common, number = Counter(sizes.values()).most_common(1)[0]
    assert number > 1, "nothing to swap with"
    ring = [path for path in paths if sizes[path] == common]
    contents = [path.read_bytes() for path in ring]
    for path, content in zip(ring, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink()


DAMAGES: list[Callable[[Sequence[Path]], None]] = [flip, truncate, extend, swap, unlink]
