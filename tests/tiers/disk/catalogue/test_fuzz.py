# SPDX-License-Identifier: Apache-2.0
"""A short form of ``python -m tests.tiers.disk.catalogue.fuzz``, and what ``check`` finds."""

from pathlib import Path

import pytest

from tests.tiers.disk.catalogue import fuzz
from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import Engine, stored
from tests.tiers.disk.catalogue.test_open import change
from vllm_overlay.tiers.disk.catalogue import Catalogue, connection, schema
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.generations import path_of

WITHOUT_RULES = ["PRAGMA ignore_check_constraints = ON", *(f"DROP TRIGGER {name}" for name in schema.TRIGGERS)]
RULES = [f"CREATE TRIGGER {name} {body}" for name, body in schema.TRIGGERS.items()]


def test_a_changed_file_is_answered_from_or_damaged(tmp_path: Path) -> None:
    counts = fuzz.run(tmp_path, mutations=60, seed=1)
    assert counts["not opened"] and counts["refused"] and counts["answered"]


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE meta SET num_bytes = num_bytes + 1", "counted"),
        ("UPDATE meta SET num_objects = num_objects - 1", "counted"),
        ("UPDATE meta SET newest_use = 5", "after 5"),
        ("UPDATE object SET num_children = 5 WHERE id = 10", "counts 5"),
        ("UPDATE object SET end_tokens = start_tokens - 1 WHERE id = 10", "CHECK"),
        ("UPDATE object SET namespace = 9 WHERE id = 10", "namespace 9"),
        ("UPDATE object SET namespace = 2 WHERE id = 210", "is in namespace 1"),
        ("UPDATE object SET number = number + 7000 WHERE id = 210", "last change of object 210"),
        ("UPDATE parent SET position = 1 WHERE child = 10", "position 1"),
        ("DELETE FROM parent WHERE child = 10", "children and counts"),
        ("DELETE FROM object WHERE id = 1", "is not there"),
        ("DELETE FROM object WHERE id = 230", "last change of object 230"),
        ("UPDATE writer SET namespace = 9", "serves namespace 9"),
        ("UPDATE garbage SET collector = 78", "78 unlinks"),
        ("UPDATE garbage SET (writer, number) = (SELECT writer, number FROM object LIMIT 1) WHERE number ="
         " (SELECT number FROM garbage LIMIT 1)", "to be unlinked"),
    ],
)  # fmt: skip
def test_check_finds_what_contradicts(tmp_path: Path, statement: str, sentence: str) -> None:
    fuzz.make(tmp_path)
    before = Catalogue(str(tmp_path))
    assert check(before) == []
    before.close()
    change(Path(path_of(str(tmp_path), 1)), *WITHOUT_RULES, statement, *RULES)
    catalogue = Catalogue(str(tmp_path))
    assert any(sentence in each for each in check(catalogue)), check(catalogue)
    catalogue.close()


@pytest.mark.parametrize("parent", [150, 10, 9999])
def test_parents_that_cannot_be_are_damage(tmp_path: Path, parent: int) -> None:
    fuzz.make(tmp_path)
    statement = f"UPDATE parent SET parent = {parent} WHERE child = 10"
    change(Path(path_of(str(tmp_path), 1)), *WITHOUT_RULES, statement, *RULES)
    catalogue = Catalogue(str(tmp_path))
    for call in (
        lambda: list(catalogue.load(fuzz.MINE)[1]),
        lambda: catalogue.changes_since(0, fuzz.MINE),
    ):
        with pytest.raises(Damaged):
            call()
    catalogue.close()


@pytest.mark.parametrize("change_of", ["object SET id", "namespace SET id", "sqlite_sequence SET seq"])
def test_a_table_without_a_number_left_is_no_full_disk(tmp_path: Path, change_of: str) -> None:
    fuzz.make(tmp_path)
    last = f"UPDATE {change_of} = {2**63 - 1} WHERE rowid = (SELECT max(rowid) FROM {change_of.split()[0]})"
    change(Path(path_of(str(tmp_path), 1)), *WITHOUT_RULES, last, *RULES)
    with pytest.raises(Damaged):
        Engine(tmp_path).store(stored(5000, writer=fuzz.ONE))


def test_more_namespaces_than_anybody_has_are_damage(tmp_path: Path) -> None:
    fuzz.make(tmp_path)
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100001)"
    change(
        Path(path_of(str(tmp_path), 1)),
        f"INSERT INTO namespace SELECT 100 + i, printf('%064x', i), '', NULL, 0 FROM ({many} SELECT i FROM n)",
    )
    with pytest.raises(Damaged, match="namespaces"):
        Catalogue(str(tmp_path)).usage()


def test_a_tree_that_takes_too_long_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz.make(tmp_path)
    monkeypatch.setattr(connection, "_STEPS_A_CALL", 50)
    monkeypatch.setattr(connection, "DEFAULT_CALLS", 3)
    with pytest.raises(Damaged, match="interrupted"):
        Catalogue(str(tmp_path)).load(fuzz.MINE)
