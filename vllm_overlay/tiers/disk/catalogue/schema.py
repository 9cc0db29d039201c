# SPDX-License-Identifier: Apache-2.0
"""Tables, triggers and settings of a catalogue's file.

A CHECK says what a column may hold. What follows from a row is a trigger, so that it is written once.
"""

import functools
import os
import sqlite3

from vllm_overlay import versions
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.rows import (
    MAX_BYTES,
    MAX_ID,
    MAX_KEY_BYTES,
    MAX_KIND_CHARS,
    MAX_PARENTS,
    MAX_RANKS,
    MAX_SCORE,
    MAX_SECONDS,
    MAX_TOKENS,
    Number,
    read_all,
)

VERSION = versions.CATALOGUE
APPLICATION_ID = 0x48_4B_56_43  # "HKVC"
MAX_WORDS_BYTES = 64 << 10
MAX_LEARNED_BYTES = 16 << 10
MOST_LOG_BYTES = 64 << 20
_MAX_VALUE_BYTES = 1 << 20
_CACHE_KIB = 4096


def _integer(column: str, least: int, most: int) -> str:
    return f"{column} INTEGER NOT NULL CHECK (typeof({column}) = 'integer' AND {column} BETWEEN {least} AND {most})"


def _text(column: str, most: int) -> str:
    return f"{column} TEXT NOT NULL CHECK (typeof({column}) = 'text' AND length({column}) <= {most})"


_FILE = f"writer INTEGER NOT NULL CHECK (typeof(writer) = 'integer'), {_integer('number', 0, MAX_ID)}"
_NAMESPACE = _integer("namespace", 1, MAX_ID)
_SIZE = f"{_integer('world_size', 1, MAX_RANKS)}, {_integer('num_bytes', 1, MAX_BYTES)}"
_KIND = _text("kind", MAX_KIND_CHARS)
_KEY = f"key BLOB NOT NULL CHECK (typeof(key) = 'blob' AND length(key) BETWEEN 1 AND {MAX_KEY_BYTES})"

_TABLES = (
    f"""CREATE TABLE meta (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        {_integer("is_complete", 0, 1)},
        actor INTEGER CHECK (typeof(actor) IN ('integer', 'null')),
        {_integer("num_bytes", 0, MAX_BYTES)},
        {_integer("num_objects", 0, MAX_BYTES)},
        {_integer("newest_use", 0, MAX_SECONDS)})""",
    f"""CREATE TABLE namespace (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL UNIQUE CHECK (typeof(fingerprint) = 'text' AND length(fingerprint) = 64),
        {_text("words", MAX_WORDS_BYTES)},
        learned BLOB CHECK (learned IS NULL OR typeof(learned) = 'blob' AND length(learned) <= {MAX_LEARNED_BYTES}),
        {_integer("is_private", 0, 1)})""",
    f"""CREATE TABLE writer (
        id INTEGER PRIMARY KEY,
        namespace INTEGER CHECK (typeof(namespace) IN ('integer', 'null')),
        {_integer("granted", 0, MAX_BYTES)})""",
    f"""CREATE TABLE object (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        {_NAMESPACE}, {_KIND}, {_KEY}, {_FILE}, {_SIZE},
        {_integer("payload_bytes", 1, MAX_BYTES)},
        {_integer("start_tokens", 0, MAX_TOKENS)},
        {_integer("end_tokens", 0, MAX_TOKENS)},
        {_integer("last_use", 0, MAX_SECONDS)},
        score REAL CHECK (score IS NULL OR typeof(score) = 'real' AND abs(score) <= {MAX_SCORE:.0f}),
        score_expiry INTEGER CHECK (typeof(score_expiry) IN ('integer', 'null')),
        place REAL GENERATED ALWAYS AS (coalesce(score, last_use)) VIRTUAL,
        {_integer("num_children", 0, MAX_ID)},
        CHECK (start_tokens <= end_tokens),
        CHECK ((score IS NULL) = (score_expiry IS NULL)))""",
    "CREATE UNIQUE INDEX object_name ON object (namespace, key, kind)",
    "CREATE UNIQUE INDEX object_file ON object (writer, number)",
    "CREATE INDEX object_leaf ON object (namespace, place, id) WHERE num_children = 0",
    "CREATE INDEX object_expiry ON object (score_expiry) WHERE score IS NOT NULL",
    f"""CREATE TABLE parent (
        {_integer("child", 1, MAX_ID)}, {_integer("position", 0, MAX_PARENTS - 1)}, {_integer("parent", 1, MAX_ID)},
        CHECK (parent < child), PRIMARY KEY (child, position)) WITHOUT ROWID""",
    f"""CREATE TABLE garbage (
        {_FILE}, {_SIZE},
        collector INTEGER CHECK (typeof(collector) IN ('integer', 'null')),
        PRIMARY KEY (writer, number)) WITHOUT ROWID""",
    f"""CREATE TABLE change (
        seq INTEGER PRIMARY KEY CHECK (seq BETWEEN 1 AND {MAX_ID}),
        {_NAMESPACE}, {_integer("is_added", 0, 1)}, {_integer("object", 1, MAX_ID)}, {_KIND}, {_KEY}, {_FILE})""",
)

_CHANGE = "INSERT INTO change (namespace, is_added, object, kind, key, writer, number) VALUES"
_OLD_FILE_IS_GARBAGE = """INSERT INTO garbage (writer, number, world_size, num_bytes, collector)
        VALUES (OLD.writer, OLD.number, OLD.world_size, OLD.num_bytes, (SELECT actor FROM meta))"""
TRIGGERS = {
    "came": f"""AFTER INSERT ON object BEGIN
        UPDATE meta SET num_bytes = num_bytes + NEW.num_bytes, num_objects = num_objects + 1,
            newest_use = max(newest_use, NEW.last_use);
        {_CHANGE} (NEW.namespace, 1, NEW.id, NEW.kind, NEW.key, NEW.writer, NEW.number);
        END""",
    "hangs": """AFTER INSERT ON parent BEGIN
        UPDATE object SET num_children = num_children + 1 WHERE id = NEW.parent;
        END""",
    "replaced": f"""AFTER UPDATE OF writer, number ON object BEGIN
        UPDATE meta SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes,
            newest_use = max(newest_use, NEW.last_use);
        {_OLD_FILE_IS_GARBAGE};
        {_CHANGE} (NEW.namespace, 1, NEW.id, NEW.kind, NEW.key, NEW.writer, NEW.number);
        END""",
    "has_children": """BEFORE DELETE ON object WHEN OLD.num_children > 0 BEGIN
        SELECT raise(ABORT, 'an object with children stays');
        END""",
    "went": f"""AFTER DELETE ON object BEGIN
        UPDATE object SET num_children = num_children - 1 WHERE id IN (SELECT parent FROM parent WHERE child = OLD.id);
        UPDATE object SET score = OLD.score, score_expiry = OLD.score_expiry
            WHERE OLD.score IS NOT NULL AND score IS NULL AND num_children = 0
            AND id IN (SELECT parent FROM parent WHERE child = OLD.id);
        DELETE FROM parent WHERE child = OLD.id;
        UPDATE meta SET num_bytes = num_bytes - OLD.num_bytes, num_objects = num_objects - 1;
        {_OLD_FILE_IS_GARBAGE};
        {_CHANGE} (OLD.namespace, 0, OLD.id, OLD.kind, OLD.key, OLD.writer, OLD.number);
        END""",
}

_LAST_NUMBERS = (
    "SELECT seq FROM sqlite_sequence UNION ALL SELECT coalesce(max(id), 0) FROM object"
    " UNION ALL SELECT coalesce(max(id), 0) FROM namespace LIMIT 100"
)
"""A table that has no number left says that the disk is full."""

_SETTINGS = (
    "PRAGMA trusted_schema = OFF",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",  # a file that is cut short must be an error, not a signal
    "PRAGMA synchronous = OFF",
    "PRAGMA wal_autocheckpoint = 256",  # a MiB: on a small disk the log takes the objects' room
    f"PRAGMA journal_size_limit = {MOST_LOG_BYTES}",
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
    db = sqlite3.connect(os.fsencode(path), isolation_level=None)
    try:
        configure(db)
        db.execute(f"PRAGMA journal_mode = {journal}")
        db.execute("BEGIN IMMEDIATE")
        _write_schema(db)
        db.execute("INSERT INTO meta VALUES (1, 0, NULL, 0, 0, 0)")
        db.execute("COMMIT")
    finally:
        db.close()


def verify(db: sqlite3.Connection, journal: str) -> None:
    """Raise Damaged unless the file has this version's tables and triggers, to the letter, and nothing else."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise Damaged("it is no catalogue")
    if version != VERSION:
        raise Damaged(f"its schema has version {version}, not {VERSION}")
    if _schema_of(db) != _expected_schema():
        raise Damaged("its tables are not those of a catalogue")
    read_all(tuple[Number], db.execute(_LAST_NUMBERS))
    if db.execute("PRAGMA journal_mode").fetchone()[0] != journal:
        raise Damaged(f"its journal is not the one of this root, {journal}")


def _write_schema(db: sqlite3.Connection) -> None:
    for statement in (*_TABLES, *(f"CREATE TRIGGER {name} {body}" for name, body in TRIGGERS.items())):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _schema_of(db: sqlite3.Connection) -> frozenset[tuple[object, ...]]:
    return frozenset(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100").fetchall())


@functools.cache
def _expected_schema() -> frozenset[tuple[object, ...]]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _write_schema(db)
        return _schema_of(db)
    finally:
        db.close()
