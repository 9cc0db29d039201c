# SPDX-License-Identifier: Apache-2.0
"""Tables, indices and settings of a catalogue's file."""

import functools
import os
import secrets
import sqlite3

from vllm_overlay import versions
from vllm_overlay.tiers.disk.catalogue.errors import Damaged

VERSION = versions.CATALOGUE
APPLICATION_ID = 0x48_4B_56_43  # "HKVC"
_MAX_VALUE_BYTES = 1 << 20
_CACHE_KIB = 4096
_MOST_LOG_BYTES = 64 << 20

_TABLES = (
    """CREATE TABLE meta (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        generation TEXT NOT NULL,
        is_complete INTEGER NOT NULL,
        rebuilder INTEGER,
        object_bytes INTEGER NOT NULL,
        num_objects INTEGER NOT NULL)""",
    """CREATE TABLE namespace (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL UNIQUE,
        partner INTEGER,
        is_temporary INTEGER NOT NULL,
        served_at INTEGER NOT NULL)""",
    """CREATE TABLE object (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        namespace INTEGER NOT NULL,
        tag TEXT NOT NULL,
        key BLOB NOT NULL,
        world_size INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        payload_bytes INTEGER NOT NULL,
        start_tokens INTEGER NOT NULL,
        end_tokens INTEGER NOT NULL,
        ticket INTEGER NOT NULL,
        last_use INTEGER NOT NULL,
        score REAL,
        score_expiry INTEGER,
        place REAL NOT NULL,
        num_children INTEGER NOT NULL)""",
    "CREATE UNIQUE INDEX object_name ON object (namespace, key, tag)",
    "CREATE INDEX object_leaf ON object (namespace, place, id) WHERE num_children = 0",
    "CREATE INDEX object_expiry ON object (score_expiry) WHERE score IS NOT NULL",
    """CREATE TABLE parent (
        child INTEGER NOT NULL,
        position INTEGER NOT NULL,
        parent INTEGER NOT NULL,
        PRIMARY KEY (child, position)) WITHOUT ROWID""",
    "CREATE INDEX parent_child ON parent (parent, child)",
    """CREATE TABLE member (
        slot INTEGER PRIMARY KEY,
        pid INTEGER NOT NULL,
        granted INTEGER NOT NULL)""",
    """CREATE TABLE serve (
        slot INTEGER NOT NULL,
        namespace INTEGER NOT NULL,
        PRIMARY KEY (slot, namespace)) WITHOUT ROWID""",
    """CREATE TABLE removal (
        namespace INTEGER NOT NULL,
        key BLOB NOT NULL,
        tag TEXT NOT NULL,
        slot INTEGER NOT NULL,
        world_size INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        PRIMARY KEY (namespace, key, tag)) WITHOUT ROWID""",
    "CREATE INDEX removal_slot ON removal (slot, num_bytes)",
    """CREATE TABLE change (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        namespace INTEGER NOT NULL,
        is_added INTEGER NOT NULL,
        object INTEGER NOT NULL,
        tag TEXT NOT NULL,
        key BLOB NOT NULL)""",
)

_SETTINGS = (
    "PRAGMA trusted_schema = OFF",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",  # a file that is cut short must be an error, not a signal
    "PRAGMA synchronous = OFF",
    "PRAGMA wal_autocheckpoint = 256",  # a MiB: on a small disk the log takes the objects' room
    f"PRAGMA journal_size_limit = {_MOST_LOG_BYTES}",  # what a stopped reader made of the log is cut off again
    "PRAGMA secure_delete = OFF",
    "PRAGMA temp_store = MEMORY",
    f"PRAGMA cache_size = -{_CACHE_KIB}",
)


def configure(db: sqlite3.Connection) -> None:
    """The settings of every connection; they change nothing in the file."""
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    for statement in _SETTINGS:
        db.execute(statement)


def create(path: str, journal: str) -> None:
    """Write a catalogue that knows nothing at ``path``, where there must be no file. Raises OSError, sqlite3.Error."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path, isolation_level=None)
    try:
        configure(db)
        db.execute(f"PRAGMA journal_mode = {journal}")
        db.execute("BEGIN IMMEDIATE")
        _write_schema(db)
        db.execute("INSERT INTO meta VALUES (1, ?, 0, NULL, 0, 0)", (secrets.token_hex(16),))
        db.execute("COMMIT")
    finally:
        db.close()


def verify(db: sqlite3.Connection, journal: str) -> None:
    """Raise Damaged unless the file has this version's tables, to the letter, and nothing else."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise Damaged("it is no catalogue")
    if version != VERSION:
        raise Damaged(f"its schema has version {version}, not {VERSION}")
    if _schema_of(db) != _expected_schema():
        raise Damaged("its tables are not those of a catalogue")
    if db.execute("PRAGMA journal_mode").fetchone()[0] != journal:
        raise Damaged(f"its journal is not the one of this file system, {journal}")


def _write_schema(db: sqlite3.Connection) -> None:
    for statement in _TABLES:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _schema_of(db: sqlite3.Connection) -> frozenset[tuple[object, ...]]:
    return frozenset(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema LIMIT 100").fetchall())


@functools.cache
def _expected_schema() -> frozenset[tuple[object, ...]]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _write_schema(db)
        return _schema_of(db)
    finally:
        db.close()
