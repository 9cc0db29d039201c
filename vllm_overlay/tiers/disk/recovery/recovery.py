# SPDX-License-Identifier: Apache-2.0
"""The thread that looks after what no living engine does: a lost catalogue; and what dead writers left: files that
nothing names, grants, and what they wanted to unlink."""

import contextlib
import logging
import os
import threading

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.file_lock import try_lock
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.catalogue import CatalogueError, Damaged
from vllm_overlay.tiers.disk.files.writer import alive_path, dead, directories_under, parse_name, writers_under
from vllm_overlay.tiers.disk.recovery.rebuild import Rebuild
from vllm_overlay.tiers.disk.site import Seat

REBUILD_LOCK = "rebuild.lock"
PAUSE_S = 10.0
RETRY_S = 0.2
_log = RateLimitedLog(logging.getLogger(__name__))


class Recovery:
    """One for each open catalogue, with one thread. It never keeps the bookkeeper waiting for longer than a
    transaction. The heir of the dead is this engine's writer, which is never buried from here."""

    def __init__(self, seat: Seat, fingerprint: str) -> None:
        self._seat = seat
        self._catalogue, self._root = seat.catalogue, seat.root
        self._rebuild = Rebuild(seat, fingerprint, lambda: self._is_closing)
        self._buried: set[str] = set()
        """Names never come again, so these need not be looked at again."""
        self.has_buried = False
        """Whether all were looked at once: what the dead held is free, and need not be evicted."""
        self.damage: Damaged | None = None
        """What is wrong with the catalogue. Nothing more is done then."""
        self._is_closing = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-recovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread, and wait for its end no longer than ``timeout_s``."""
        self._is_closing = True
        self._woken.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_closing:
            self._woken.wait(PAUSE_S if self._try() else RETRY_S)

    def _try(self) -> bool:
        """Whether nothing is left to do now."""
        try:
            if not self._catalogue.totals().is_complete and not self._rebuild_alone():
                return False
            is_done = self.bury_the_dead()
            self.has_buried |= is_done
            return is_done
        except SHUTDOWN:
            raise
        except Damaged as error:
            self.damage = error
            self._is_closing = True
        except BaseException as error:
            if not self._is_closing:
                key, how = ("recovery", "%s") if isinstance(error, CatalogueError | OSError) else ("defect", "%r")
                _log.warning(key, f"disk tier: recovery of %s has to wait: {how}", self._root, error)
        return False

    def _rebuild_alone(self) -> bool:
        """Whether the catalogue knows all files now. One process at a time reads them."""
        fd = try_lock(os.path.join(self._root, REBUILD_LOCK))
        if fd is None:
            return False
        try:
            if not self._catalogue.totals().is_complete:
                if not self._rebuild.run():
                    return False
                self._catalogue.end_rebuild()
            return True
        finally:
            os.close(fd)

    def bury_the_dead(self) -> bool:
        """Everybody, with a row or without one. False where that has to wait for a complete catalogue."""
        known = self._catalogue.writers() | set(writers_under(self._root))
        self._buried &= known
        for writer in sorted(known - self._buried - {self._seat.writer}):
            if self._is_closing:
                return False
            try:
                with dead(self._root, writer, self._seat.site.device) as is_dead:
                    if is_dead and not self._bury(writer):
                        return False
            except OSError as error:  # nobody else's burial, and no eviction, waits for a directory that cannot be read
                _log.warning("burial", "disk tier: a dead writer cannot be looked after now: %s", error)
        return True

    def _bury(self, writer: str) -> bool:
        """The order matters: what is listed before the rows are read, and is named by none, was never committed."""
        directories = directories_under(self._root, writer)
        found = []
        for directory in directories:
            with contextlib.suppress(FileNotFoundError):  # it went with its last file
                found += [os.path.join(directory, name) for name in os.listdir(directory)]
        if os.path.lexists(alive_path(self._root, writer)):  # it was being made when its directory was found
            return True
        named = self._catalogue.numbers_of(writer)
        if named is None:
            return False
        for path in found:
            if (parsed := parse_name(os.path.basename(path))) is not None and parsed[0] not in named:
                with contextlib.suppress(FileNotFoundError):  # one that stays keeps the grant that it was written into
                    self._seat.site.device.unlink(path)
        self._catalogue.bury(writer, self._seat.writer)
        for directory in (*directories, os.path.join(self._root, writer)):
            with contextlib.suppress(OSError):  # it has files
                os.rmdir(directory)
        self._buried.add(writer)
        return True
