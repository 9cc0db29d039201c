# SPDX-License-Identifier: Apache-2.0
"""Reads the headers of all objects of a namespace, several directories at a time."""

import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.ownership import why_not_ours
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.listing import Listing, read_found, sort_files
from vllm_overlay.tiers.disk.files.object_file import BadObject, HeaderReader
from vllm_overlay.tiers.disk.files.scan import FoundFile, fan_out_directories
from vllm_overlay.tiers.disk.thread_pool import ThreadPool

_PROGRESS_S = 10.0
_READ_THREADS = 4
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


class HeaderScan:
    """One scan of one root.

    ``is_closing`` is asked often. Once it says yes, what was found means nothing.
    """

    def __init__(self, root: str, device: Device, is_closing: Callable[[], bool]) -> None:
        self._root = root
        self._device = device
        self._is_closing = is_closing

    def run(self, fingerprint: str, readers: Sequence[HeaderReader]) -> Listing:
        """What the namespace holds. Raises OSError when its directory cannot be listed now."""
        directories = fan_out_directories(self._root, fingerprint, is_strict=True)
        ours = [directory for directory in directories if self.is_ours(directory)]
        listings: queue.SimpleQueue[Listing | BaseException] = queue.SimpleQueue()
        pool = ThreadPool("disk-recovery-read", _READ_THREADS)
        for directory in ours:
            pool.submit(partial(self._scan_directory, fingerprint, directory, readers, listings))
        found = Listing(num_unread=len(directories) - len(ours))
        logged = time.monotonic()
        try:
            for number in range(1, 1 + len(ours)):
                listing = listings.get()
                if isinstance(listing, BaseException):
                    raise listing
                found.add(listing)
                if time.monotonic() - logged > _PROGRESS_S and not self._is_closing():
                    logged = time.monotonic()
                    logger.info(
                        "disk tier: recovered %d objects so far, in %d of %d directories of %s",
                        len(found.objects), number, len(ours), fingerprint[:16],
                    )  # fmt: skip
        finally:
            pool.stop(0.0)
        return found

    def is_ours(self, directory: str) -> bool:
        """Whether nobody else could have put files into this directory of a namespace. If somebody could, all in it is
        left alone."""
        for path in (os.path.dirname(directory), directory):
            try:
                why = why_not_ours(os.lstat(path))
            except OSError as error:
                why = f"cannot be looked at ({error.strerror})"
            if why:
                _log.warning("owner", "disk tier: not recovered: %s %s: set its mode to 0700", path, why)
                return False
        return True

    def read(
        self, fingerprint: str, object_id: ObjectId, files: dict[int, FoundFile], readers: Sequence[HeaderReader],
        listing: Listing,
    ) -> None:  # fmt: skip
        """Add the object of these files to ``listing``."""
        try:
            found = read_found(self._device, fingerprint, object_id, files, readers)
            listing.objects.append(found)
            listing.useless.extend(file for rank, file in files.items() if rank >= len(found.files))
        except BadObject as bad:
            _log.warning(bad.reason, "disk tier: not recovered (%s): %s", bad.reason, next(iter(files.values())).path)
            if bad.is_bad:
                listing.useless.extend(files.values())
            else:
                listing.num_unread += 1

    # In the threads that read.

    def _scan_directory(
        self, fingerprint: str, directory: str, readers: Sequence[HeaderReader],
        listings: "queue.SimpleQueue[Listing | BaseException]",
    ) -> None:  # fmt: skip
        """Puts one listing, or what went wrong, because either is waited for."""
        listing = Listing()
        try:
            for object_id, files in sort_files(directory, listing.useless).items():
                if self._is_closing():
                    break
                self.read(fingerprint, object_id, files, readers, listing)
        except OSError as error:
            _log.warning("list", "disk tier: not recovered: %s", error)
            listing.num_unread += 1
            listings.put(listing)
        except SHUTDOWN:
            raise
        except BaseException as error:
            listings.put(error)
        else:
            listings.put(listing)
