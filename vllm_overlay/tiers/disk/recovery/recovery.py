# SPDX-License-Identifier: Apache-2.0
"""The thread that looks after what no living engine does: a lost catalogue, and dead writers."""

import logging
import os
import threading
from collections.abc import Callable

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.file_lock import try_lock
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.catalogue import CatalogueError, Damaged
from vllm_overlay.tiers.disk.recovery.burial import Burial
from vllm_overlay.tiers.disk.recovery.rebuild import Rebuild
from vllm_overlay.tiers.disk.site import Seat

REBUILD_LOCK = "rebuild.lock"
PAUSE_S = 10.0
RETRY_S = 0.2
_log = RateLimitedLog(logging.getLogger(__name__))


class Recovery:
    """One for each open catalogue, with one thread. It never keeps the bookkeeper waiting for longer than a
    transaction."""

    def __init__(self, seat: Seat, fingerprint: str) -> None:
        self._catalogue = seat.catalogue
        self._root = seat.root
        self._burial = Burial(seat, self._is_closing)
        self._rebuild = Rebuild(seat, fingerprint, self._is_closing)
        self.has_buried = False
        """Whether all were looked at once: what the dead held is free, and need not be evicted."""
        self.damage: Damaged | None = None
        """What is wrong with the catalogue. Nothing more is done then."""
        self._closing = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-recovery", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread, and wait for its end no longer than ``timeout_s``."""
        self._closing = True
        self._woken.set()
        self._thread.join(timeout_s)

    def _is_closing(self) -> bool:
        return self._closing

    def _run(self) -> None:
        while not self._closing:
            is_done = self._try(self._step)
            self._woken.wait(PAUSE_S if is_done else RETRY_S)

    def _step(self) -> bool:
        """Whether nothing is left to do now."""
        if not self._catalogue.totals().is_complete and not self._rebuild_alone():
            return False
        is_done = self._burial.run()
        self.has_buried |= is_done
        return is_done

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

    def _try(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except SHUTDOWN:
            raise
        except Damaged as error:
            self.damage = error
            self._closing = True
        except (CatalogueError, OSError) as error:
            if not self._closing:
                _log.warning("recovery", "disk tier: recovery of %s has to wait: %s", self._root, error)
        except BaseException as error:
            if not self._closing:
                _log.warning("defect", "disk tier: recovery of %s failed: %r", self._root, error)
        return False
