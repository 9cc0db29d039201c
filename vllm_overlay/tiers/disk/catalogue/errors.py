# SPDX-License-Identifier: Apache-2.0
"""What a catalogue raises, and which of SQLite's errors mean that."""

import contextlib
import sqlite3
from collections.abc import Iterator

import msgspec


class CatalogueError(Exception):
    """The base of everything that a catalogue raises besides ``ValueError`` for a wrong call."""


class Damaged(CatalogueError):
    """The file cannot be believed. Give ``generation`` to ``replace_damaged`` and rebuild from the objects' files."""

    def __init__(self, why: str, generation: int = 0) -> None:
        super().__init__(why)
        self.generation = generation


class Superseded(CatalogueError):
    """Another catalogue took the place of the one that is open here. Close this one and open the root again."""


class Busy(CatalogueError):
    """Other processes held the catalogue for longer than the timeout. Nothing was changed; try again later."""


class Unavailable(CatalogueError):
    """The file system failed: no room, no descriptors, an input/output error. The file itself may be sound."""


class FellBehind(CatalogueError):
    """Changes after this number were trimmed. Load everything again."""


_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_UNAVAILABLE = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS,
}  # fmt: skip
_OF_THE_FILE = {sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}
"""Extended codes of input/output errors that a wrong file causes."""


def is_busy(error: sqlite3.Error) -> bool:
    """Whether to wait and try again."""
    return _primary(error) in _BUSY


def _primary(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)) & 0xFF


@contextlib.contextmanager
def translated(generation: int) -> Iterator[None]:
    """Raise CatalogueError in place of SQLite's, msgspec's and the file system's errors.

    What is neither busy nor the file system's fault is the file's: its content is hostile input.
    """
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a wrong call of ours, say on a closed catalogue
    except sqlite3.Error as error:
        if is_busy(error):
            raise Busy(f"the catalogue is locked: {error}") from error
        if _primary(error) in _UNAVAILABLE and getattr(error, "sqlite_errorcode", 0) not in _OF_THE_FILE:
            raise Unavailable(str(error)) from error
        raise Damaged(str(error), generation) from error
    except OSError as error:
        raise Unavailable(str(error)) from error
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Damaged(f"a row is wrong: {error}", generation) from error
    except Damaged as error:
        error.generation = error.generation or generation
        raise
