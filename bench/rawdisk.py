# SPDX-License-Identifier: Apache-2.0
"""What the file system gives without us: large aligned blocks, one after the other, by several threads."""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK_BYTES = 16 << 20
_PAGE_BYTES = 4096


class RawFiles:
    """Files of equal size, as many as there are threads that write them, read by as many as read.

    ``memory`` is where the bytes come from and go to. It is the tier's own, because a disk's speed depends on it. Pages
    that do not follow each other in physical memory make more and smaller requests, a third as fast on some machines.
    """

    def __init__(
        self, directory: Path, memory: memoryview, write_threads: int, read_threads: int, direct: bool
    ) -> None:
        self._flags = os.O_DIRECT if direct else 0
        num_files = max(write_threads, read_threads)
        self._paths = [directory / f"raw-{place}" for place in range(num_files)]
        self._blocks = [
            memory[start : start + _BLOCK_BYTES] for start in range(0, len(memory) - _BLOCK_BYTES + 1, _BLOCK_BYTES)
        ]
        self._writers, self._readers = ThreadPoolExecutor(write_threads), ThreadPoolExecutor(read_threads)

    def write(self, num_bytes: int) -> None:
        """New files with so many bytes in all, up to a page each."""
        share = -(-num_bytes // len(self._paths) // _PAGE_BYTES) * _PAGE_BYTES
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags

        def write(place: int) -> None:
            self._each_block(place, flags, share, os.pwritev)

        list(self._writers.map(write, range(len(self._paths))))

    def read(self) -> None:
        """All of them."""

        def read(place: int) -> None:
            self._each_block(place, os.O_RDONLY | self._flags, self._paths[place].stat().st_size, os.preadv)

        list(self._readers.map(read, range(len(self._paths))))

    def _each_block(self, place: int, flags: int, num_bytes: int, call: Callable[..., int]) -> None:
        """In turn from or to the blocks that are this file's."""
        blocks = itertools.cycle(self._blocks[place :: len(self._paths)])
        fd = os.open(self._paths[place], flags, 0o600)
        try:
            done = 0
            while done < num_bytes:
                moved = call(fd, [next(blocks)[: num_bytes - done]], done)
                if moved <= 0:
                    raise OSError(f"{self._paths[place]} ends at {done} of {num_bytes} bytes")
                done += moved
        finally:
            os.close(fd)

    def remove(self) -> None:
        for path in self._paths:
            path.unlink()


def settle(directory: Path) -> None:
    """Wait until files removed under ``directory`` are gone and the file system's journal is written."""
    while any(directory.glob("tier/*/*/*")):
        time.sleep(0.01)
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
