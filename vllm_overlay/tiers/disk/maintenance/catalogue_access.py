# SPDX-License-Identifier: Apache-2.0
"""How tools open the catalogue of a root. They open only one that is there, and only for as long as they run."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.catalogue.errors import translated
from vllm_overlay.tiers.disk.catalogue.generations import newest
from vllm_overlay.tiers.disk.files.root import lock_directory

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
