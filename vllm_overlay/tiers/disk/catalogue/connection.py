# SPDX-License-Identifier: Apache-2.0
"""One open catalogue: bounded waits, one transaction at a time, and no connection that crosses a fork."""

import contextlib
import os
import random
import sqlite3
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_overlay.tiers.disk.catalogue import generations, schema
from vllm_overlay.tiers.disk.catalogue.errors import Busy, Damaged, Superseded, Unavailable, is_busy, translated

_POLL_S = 0.004
_WRITES_A_LOOK = 16
"""After so many of its own a process looks how long the log is."""
_STEPS_A_CALL = 1_000_000
DEFAULT_CALLS = 64
LONG_CALLS = 8192
"""How many million steps of SQLite one transaction may take: a forged tree must not keep us for ever."""
_LOCKS = Path("/proc/locks")
_WRITER, _READERS = range(120, 121), range(123, 128)
"""The bytes of the -shm file that a writer, and those who read, lock: part of SQLite's file format."""
_open: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_abandoned: list[object] = []
"""Connections of the parent process. Closing one here would be a second process's word about the parent's locks."""


class Connection:
    """Threads of one process may share it; they take turns. Every transaction may wait ``timeout_s``."""

    def __init__(self, root: str, journal: str = "wal", timeout_s: float = generations.DEFAULT_TIMEOUT_S) -> None:
        """Open the catalogue of a root, or begin one that must be rebuilt.

        ``journal`` is "wal" on a local file system, else "delete". Raises CatalogueError, and ConfigError where the
        root is not a directory of this user; one that is not there is ``Unavailable``.
        """
        self._journal = journal
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._calls_left = DEFAULT_CALLS
        self._num_bytes = self._num_writes = 0
        self._log_is_long = False
        with translated(0):
            generations.check_root(root)
            with generations.root_locked(root, timeout_s):
                self.generation = generations.ensure(root, journal)
                """Which of the root's catalogues this is."""
                self._path = generations.path_of(root, self.generation)
                self._next_path = generations.path_of(root, self.generation + 1)
                self._file = generations.check_file(self._path, self.generation)
        self._db = self._connect()
        _open.add(self)

    def _connect(self) -> sqlite3.Connection:
        uri = f"file:{urllib.parse.quote(os.fsencode(os.path.abspath(self._path)))}?mode=rw"
        with translated(self.generation):
            db = sqlite3.connect(uri, timeout=0, isolation_level=None, check_same_thread=False, uri=True)
            try:
                db.set_progress_handler(self._is_too_long, _STEPS_A_CALL)
                self._patiently(lambda: schema.configure(db))
                self._patiently(lambda: schema.verify(db, self._journal))
            except BaseException:
                db.close()
                raise
            return db

    def writing(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """A transaction that others see as a whole or not at all. Raises CatalogueError."""
        return self._transaction("BEGIN IMMEDIATE", DEFAULT_CALLS)

    def reading(self, num_calls: int = DEFAULT_CALLS) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """One state of the file, whoever writes meanwhile. Raises CatalogueError."""
        return self._transaction("BEGIN", num_calls)

    def close(self) -> None:
        """The rows of writers stay. In a child process it leaves the parent's connection alone."""
        if os.getpid() == self._pid:
            _open.discard(self)
            with self._turn:
                self._db.close()

    @contextlib.contextmanager
    def _transaction(self, begin: str, num_calls: int) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._pid:
            raise ValueError("a catalogue must be opened in the process that uses it")
        if not self._turn.acquire(timeout=self._timeout_s):
            raise Busy("another thread of this process has the catalogue")
        try:
            with translated(self.generation):
                self._check_file()
                self._calls_left = num_calls
                if begin != "BEGIN":
                    self._cut_log()
                self._patiently(lambda: self._begin(begin))
                try:
                    self._check_size()
                    yield self._db
                    self._patiently(self._commit)
                except sqlite3.OperationalError as error:
                    code = getattr(error, "sqlite_errorcode", None)
                    if code == sqlite3.SQLITE_READONLY and os.access(self._path, os.W_OK):
                        raise Damaged("its header says that nobody may write it", self.generation) from error
                    raise
                finally:
                    self._roll_back()
        finally:
            self._turn.release()

    def _check_file(self) -> None:
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            raise Superseded(f"{self._path} was removed") from None
        except OSError as error:
            raise Unavailable(str(error)) from error
        if not os.path.samestat(found, self._file):
            raise Superseded(f"{self._path} is another file now")
        if os.path.lexists(self._next_path):
            raise Superseded(f"{self._next_path} took its place")

    def _check_size(self) -> None:
        """In a transaction: before, it may have what another one has added that then fails."""
        num_bytes = os.lstat(self._path).st_size
        if num_bytes < self._num_bytes:  # SQLite may go on for long with what it has in memory
            raise Damaged("it was cut short")
        self._num_bytes = num_bytes

    def _cut_log(self) -> None:
        """Who is stopped while it reads keeps the log from being used anew. Raises Unavailable once it is too long."""
        self._num_writes += 1
        if self._num_writes % _WRITES_A_LOOK and not self._log_is_long:
            return
        with contextlib.suppress(FileNotFoundError):
            self._log_is_long = os.lstat(f"{self._path}-wal").st_size > schema.MOST_LOG_BYTES
            if self._log_is_long and self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                who = _find_holder(self._path, _READERS)
                raise Unavailable(f"{self._path}-wal cannot be cut off because {who} reads: continue or end it")

    def _commit(self) -> None:
        """With a rollback journal it has to wait for who reads."""
        self._db.execute("COMMIT")

    def _begin(self, begin: str) -> None:
        self._db.execute(begin)
        try:
            self._db.execute("SELECT 1 FROM meta").fetchone()  # only now a reader has its state
        except sqlite3.Error:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _patiently(self, attempt: Callable[[], None]) -> None:
        """Try until the timeout, all who wait equally often.

        SQLite's own pauses grow up to 0.1 s, so whoever came last is first. With much shorter ones than ours thirty who
        wait keep a core busy, and who has the lock does not run.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return attempt()
            except sqlite3.Error as error:
                if not is_busy(error):
                    raise
                if time.monotonic() >= deadline:
                    raise Busy(f"{self._path} is locked by {_find_holder(self._path, _WRITER)}") from error
            time.sleep(random.uniform(0.5, 1.5) * _POLL_S)

    def _is_too_long(self) -> bool:
        self._calls_left -= 1
        return self._calls_left < 0


def _find_holder(path: str, where: range) -> str:
    """ "process 123", as far as the kernel says so. Opens no file of SQLite's: closing it would drop our own locks."""
    try:
        inode = os.lstat(f"{path}-shm").st_ino
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return "another process"
    for line in lines:  # 1: POSIX  ADVISORY  WRITE 4711 fd:01:1234 120 120
        fields = line.split()
        if len(fields) == 8 and fields[5].endswith(f":{inode}") and fields[6].isdecimal() and int(fields[6]) in where:
            return f"process {fields[4]}"
    return "another process"


def _leave_connections_to_parent() -> None:
    _abandoned.extend(connection._db for connection in _open)
    _open.clear()


os.register_at_fork(after_in_child=_leave_connections_to_parent)
