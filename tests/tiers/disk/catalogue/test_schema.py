# SPDX-License-Identifier: Apache-2.0
"""What follows from a row: no statement of a trigger can be left out. And what a column cannot hold."""

import sqlite3
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.inside import reading, writing
from tests.tiers.disk.catalogue.objects import MANY, MODEL, NOW, Engine, files, numbers, object_id
from vllm_overlay.tiers.disk.catalogue import Damaged, File, Gone, Limits, Scored, schema

STATEMENTS = [(name, place) for name, body in schema.TRIGGERS.items() for place in range(body.count(";"))]


def without(name: str, left_out: int) -> dict[str, str]:
    """The triggers, one of them with one statement less; with none at all it is dropped."""
    head, _, body = schema.TRIGGERS[name].partition("BEGIN")
    statements = body.split(";")[:-1]
    del statements[left_out]
    others = {each: trigger for each, trigger in schema.TRIGGERS.items() if each != name}
    return others | ({name: f"{head}BEGIN{';'.join(statements)}; END"} if statements else {})


def broken_promises(root: Path) -> list[str]:
    """A short life of a catalogue: what of it is not as it should be."""
    one = Engine(root)
    try:
        return list(_broken_promises(one, Engine(root)))
    except (Damaged, AssertionError, StopIteration) as error:
        return [str(error) or "a call gave another answer"]
    finally:
        one.close()


def _broken_promises(one: Engine, two: Engine) -> list[str]:
    found: list[str] = []
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, (1,), last_use=NOW + 9), one.stored(3))
    found += check(one.catalogue)
    came = one.catalogue.changes_since(0, MODEL.fingerprint).changes
    if [change.file.number for change in came] != [0, 1, 2, 3]:
        found.append("nobody is told of what came")
    one.catalogue.publish_scores(MODEL.fingerprint, [Scored(object_id(2), 1.0, MANY)], NOW + 1000)
    two.grant(MANY // 64)
    two.commit(two.stored(1, (0,), num_bytes=4096 * 3, last_use=NOW + 20), replaced=File(one.name, 1))
    found += check(one.catalogue)
    if two.catalogue.totals().newest_use != NOW + 20:
        found.append("a use is forgotten")
    if files(two.catalogue.garbage(two.name)) != [File(one.name, 1)]:
        found.append("a file that was replaced is nobody's")
    try:
        with writing(one.catalogue) as db:
            db.execute("DELETE FROM object WHERE id = 2")
        found.append("an object went from below another")
    except Damaged:
        pass
    seq, _ = one.catalogue.load(MODEL.fingerprint)
    if numbers(one.evict(Limits(MANY, 1), NOW)) != [2]:
        found.append("another went first")
    found += check(one.catalogue)
    if one.catalogue.changes_since(seq, MODEL.fingerprint).changes != [Gone(object_id(2), File(one.name, 2))]:
        found.append("nobody is told of what went")
    if one.catalogue.totals().num_bytes != 2 * 8192 + 12288 + 2 * 8192 + two.catalogue.give_back(two.name, 0):
        found.append("bytes are not counted")
    if numbers(one.evict(Limits(MANY, 3), NOW)) != [1, 0, 3]:
        found.append("what hung on nothing else stayed")
    return found


def test_all_triggers_together_keep_every_promise(tmp_path: Path) -> None:
    assert broken_promises(tmp_path) == []


@pytest.mark.parametrize(("name", "left_out"), STATEMENTS)
def test_no_statement_of_a_trigger_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, left_out: int
) -> None:
    monkeypatch.setattr(schema, "TRIGGERS", without(name, left_out))
    schema._expected_schema.cache_clear()
    try:
        assert broken_promises(tmp_path) != []
    finally:
        schema._expected_schema.cache_clear()


WRONG: dict[str, dict[str, tuple[object, ...]]] = {
    "meta": {"is_complete": (2, "x"), "num_bytes": (-1, 1.5), "num_objects": (-1, b""), "newest_use": (-1, 1 << 41)},
    "namespace": {"fingerprint": ("f", b"0" * 64), "words": ("x" * 65537, b""), "learned": (b"x" * 16385, "x"),
                  "is_private": (2,)},
    "writer": {"namespace": ("x", 1.5), "granted": (-1, "x")},
    "object": {"namespace": (0,), "kind": (b"f0", "f" * 18), "key": (b"", b"x" * 65, "x"), "writer": ("x", 1.5),
               "number": (-1,), "world_size": (0, 10_001), "num_bytes": (0,), "payload_bytes": (0,),
               "start_tokens": (-1, 1 << 30), "end_tokens": (-1,), "last_use": (-1, "x"), "score": (1e16, "x"),
               "score_expiry": (1.5, 5), "num_children": (-1,)},
    "parent": {"child": (0,), "position": (8, -1), "parent": (0, 1000)},
    "garbage": {"writer": ("x",), "number": (-1,), "world_size": (0,), "num_bytes": (0,), "collector": ("x",)},
    "change": {"namespace": (0,), "is_added": (2,), "object": (0,), "kind": (b"",), "key": (b"",), "writer": ("x",),
               "number": (-1,)},
}  # fmt: skip


def test_no_column_takes_what_cannot_be_read_back(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, last_use=1))
    one.evicted(1)
    for table, columns in WRONG.items():
        with reading(one.catalogue) as db:
            ours = {row[1] for row in db.execute(f"PRAGMA table_info({table})")} - {"id", "seq", "actor"}
        assert ours == set(columns)
        for column, values in columns.items():
            for value in (*values, *(() if column in NULLABLE else (None,))):
                try:
                    with writing(one.catalogue) as db:
                        db.execute(f"UPDATE {table} SET {column} = ?", (value,))
                except Damaged:
                    continue
                pytest.fail(f"{table}.{column} took {value!r}")
    assert check(one.catalogue) == []


NULLABLE = ("learned", "namespace", "score", "score_expiry", "collector")


def test_what_sqlite_of_the_oldest_system_has_is_enough() -> None:
    """RHEL 9 has 3.34: no STRICT (3.37), no RETURNING (3.35)."""
    package = Path(schema.__file__).parent
    words = " ".join(path.read_text() for path in package.glob("*.py"))
    assert " RETURNING " not in words and ") STRICT" not in words
    assert sqlite3.sqlite_version_info >= (3, 34)
