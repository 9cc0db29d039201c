# SPDX-License-Identifier: Apache-2.0
"""Looks after what dead writers left: files that nothing names, grants, and what they wanted to unlink."""

import contextlib
import os
from collections.abc import Callable

from vllm_overlay.tiers.disk.files.device import remove_quietly
from vllm_overlay.tiers.disk.files.writer import dead, directories_under, has_begun, parse_name, writers_under
from vllm_overlay.tiers.disk.site import Seat


class Burial:
    """Called in the recovery thread. The heir is this engine's writer, which is never buried from here."""

    def __init__(self, seat: Seat, is_closing: Callable[[], bool]) -> None:
        self._catalogue = seat.catalogue
        self._root = seat.root
        self._heir = seat.writer
        self._device = seat.site.device
        self._is_closing = is_closing
        self._buried: set[str] = set()
        """Names never come again, so these need not be looked at again."""

    def run(self) -> bool:
        """Bury everybody who is dead, with a row or without one. Returns False where that has to wait for a complete
        catalogue. Raises CatalogueError, OSError."""
        known = {row.name for row in self._catalogue.writers() if row.fingerprint is not None or row.granted}
        there = set(writers_under(self._root))
        self._buried &= there | known
        for writer in sorted((there | known) - self._buried - {self._heir}):
            if self._is_closing():
                return False
            with dead(self._root, writer, self._device) as is_dead:
                if not is_dead:
                    continue
                if not self._bury(writer):
                    return False
        return True

    def _bury(self, writer: str) -> bool:
        """The order matters: what is listed before the rows are read, and is named by none, was never committed."""
        directories = directories_under(self._root, writer)
        found = [
            (parsed[0] if (parsed := parse_name(name)) else None, os.path.join(directory, name))
            for directory in directories
            for name in os.listdir(directory)
        ]
        if has_begun(self._root, writer):  # it was being made when its directory was found
            return True
        named = self._catalogue.numbers_of(writer)
        if named is None:
            return False
        for number, path in found:
            if number is not None and number not in named:
                remove_quietly(self._device, path)
        self._catalogue.bury(writer, self._heir)
        for directory in (*directories, os.path.join(self._root, writer)):
            with contextlib.suppress(OSError):  # it has files
                os.rmdir(directory)
        self._buried.add(writer)
        return True
