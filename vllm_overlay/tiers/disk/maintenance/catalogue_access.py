# SPDX-License-Identifier: Apache-2.0
"""How tools open the catalogue of a root. They open only one that is there, and only for as long as they run."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.catalogue.errors import translated
from vllm_overlay.tiers.disk.catalogue.generations import newest
from vllm_overlay.tiers.disk.catalogue.members import count_living
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.marker import mark_old_root
from vllm_overlay.tiers.disk.files.old_root import take_over
from vllm_overlay.tiers.disk.files.recognition import RootKind
from vllm_overlay.tiers.disk.files.root import lock_directory, open_root
from vllm_overlay.tiers.disk.maintenance.remover import Remover

_Result = TypeVar("_Result")


def has_catalogue(root: str) -> bool:
    """Whether there is a file of that name. Raises CatalogueError when nobody can say."""
    with translated(0):
        try:
            return newest(lock_directory(root)) > 0
        except (FileNotFoundError, NotADirectoryError):
            return False


def open_existing(root: str) -> Catalogue | None:
    """The catalogue, or None where there is none. Makes none. Raises CatalogueError, and ConfigError for another user's
    root."""
    return Catalogue(lock_directory(root)) if has_catalogue(root) else None


def count_members(root: str) -> int:
    """How many processes have joined any catalogue of this root. Raises CatalogueError when nobody can say."""
    with translated(0):
        try:
            return count_living(lock_directory(root))
        except (FileNotFoundError, NotADirectoryError):
            return 0


def open_or_begin(root: str, device: Device, kind: RootKind) -> Catalogue:
    """The catalogue of a root that the tool may change. A new catalogue knows nothing yet.

    Raises CatalogueError and OSError. Raises ConfigError for another user's root, and for one that an earlier version
    uses.
    """
    bring_up_to_date(root, device, kind)
    return Catalogue(lock_directory(root))


def bring_up_to_date(root: str, device: Device, kind: RootKind) -> None:
    """Make a root one of this version, as a server's start does. Raises as ``open_or_begin`` does."""
    if kind is not RootKind.MARKED:
        take_over(device, root)
        mark_old_root(device, root)
    if (directory := lock_directory(root)) != root:
        open_root(device, directory)


@contextlib.contextmanager
def joined(catalogue: Catalogue, root: str, device: Device) -> Iterator[Remover]:
    """Be a member that serves nothing, and close the catalogue at the end.

    Files whose rows are gone are unlinked at the end, even after Ctrl-C. What cannot be finished is left to the process
    that buries this one.
    """
    with contextlib.closing(catalogue):
        catalogue.join([], int(time.time()))
        remover = Remover(catalogue, root, device)
        try:
            yield remover
        finally:
            remover.finish()
            catalogue.leave()


def without_interruption(call: Callable[[], _Result]) -> _Result:
    """Returns what a long call on a catalogue returns. Ctrl-C takes effect after the call.

    SQLite asks Python now and then whether to go on. An exception there looks like an error of the file.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    signals: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        return call()
    finally:
        signal.signal(signal.SIGINT, before)
        if signals:
            signal.raise_signal(signal.SIGINT)
