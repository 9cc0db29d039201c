# SPDX-License-Identifier: Apache-2.0
"""A short form of ``python -m tests.tiers.disk.catalogue.fuzz``, and what ``check`` finds."""

from pathlib import Path

import pytest

from tests.tiers.disk.catalogue import fuzz
from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import name
from tests.tiers.disk.catalogue.test_open import change
from vllm_overlay.tiers.disk.catalogue import Catalogue, connection
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.generations import path_of


def test_a_changed_file_is_answered_from_or_damaged(tmp_path: Path) -> None:
    counts = fuzz.run(tmp_path, mutations=60, seed=1)
    assert counts["not opened"] and counts["refused"] and counts["answered"]


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE meta SET object_bytes = object_bytes + 1", "counted"),
        ("UPDATE meta SET num_objects = num_objects - 1", "counted"),
        ("UPDATE object SET num_children = 5 WHERE id = 10", "counts 5"),
        ("UPDATE object SET place = 3.5 WHERE id = 10", "another place"),
        ("UPDATE object SET start_tokens = end_tokens + 1 WHERE id = 10", "before it starts"),
        ("UPDATE object SET namespace = 9 WHERE id = 10", "namespace 9"),
        ("UPDATE object SET namespace = 3 WHERE id = 180", "is in namespace 1"),
        ("UPDATE parent SET parent = 150 WHERE child = 10", "older than its parent"),
        ("UPDATE parent SET position = 1 WHERE child = 10", "position 1"),
        ("DELETE FROM parent WHERE child = 10", "children and counts"),
        ("DELETE FROM object WHERE id = 1", "is not there"),
        ("UPDATE serve SET namespace = 9 WHERE slot = 1 AND namespace = 1", "serves namespace 9"),
        ("INSERT INTO serve VALUES (77, 1)", "slot 77"),
        ("UPDATE removal SET slot = 78", "slot 78"),
        ("UPDATE removal SET namespace = 1, (key, tag) = (SELECT key, tag FROM object LIMIT 1) WHERE key ="
         " (SELECT key FROM removal LIMIT 1)", "being removed"),
    ],
)  # fmt: skip
def test_check_finds_what_contradicts(tmp_path: Path, statement: str, sentence: str) -> None:
    fuzz.make(tmp_path)
    before = Catalogue(str(tmp_path))
    assert check(before) == []
    before.close()
    change(Path(path_of(str(tmp_path), 1)), statement)
    catalogue = Catalogue(str(tmp_path))
    assert any(sentence in each for each in check(catalogue)), check(catalogue)
    catalogue.close()


@pytest.mark.parametrize("parent", [150, 10, 9999])
def test_parents_that_cannot_be_are_damage(tmp_path: Path, parent: int) -> None:
    fuzz.make(tmp_path)
    change(Path(path_of(str(tmp_path), 1)), f"UPDATE parent SET parent = {parent} WHERE child = 10")
    catalogue = Catalogue(str(tmp_path))
    for call in (
        lambda: list(catalogue.load(fuzz.OURS)[1]),
        lambda: catalogue.changes_since(0, fuzz.OURS),
        lambda: catalogue.find([name(9)]),
    ):
        with pytest.raises(Damaged):
            call()
    catalogue.close()


def test_more_namespaces_than_anybody_has_are_damage(tmp_path: Path) -> None:
    fuzz.make(tmp_path)
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 10001)"
    change(
        Path(path_of(str(tmp_path), 1)),
        f"INSERT INTO namespace SELECT 100 + i, printf('%064x', i), NULL, 0, 0 FROM ({many} SELECT i FROM n)",
    )
    with pytest.raises(Damaged, match="namespaces"):
        Catalogue(str(tmp_path)).usage()


def test_a_tree_that_takes_too_long_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz.make(tmp_path)
    monkeypatch.setattr(connection, "_STEPS_A_CALL", 50)
    monkeypatch.setattr(connection, "DEFAULT_CALLS", 3)
    with pytest.raises(Damaged, match="interrupted"):
        Catalogue(str(tmp_path)).load(fuzz.OURS)
