# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests before and after the series: what counts as worse, and where the tests come from."""

import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from devtools import upstream_tests
from devtools.upstream_set import LEFT_OUT, TESTS
from devtools.upstream_tests import compare, file_of, main, name_of, outcome_of, pip_install, take_tests
from vllm_overlay.patching.diff import PatchError


@pytest.fixture
def source(tmp_path):
    """An unpacked source distribution in small."""
    root = tmp_path / "vllm-0.32.0"
    for path in (
        "tests/v1/test_a.py",
        "tests/__init__.py",
        "examples/proxy.py",
        "vllm/__init__.py",
        "vllm/tests/test_b.py",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    return root


def files_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("packed", [False, True])
def test_the_tests_are_taken_out_without_the_vllm_beside_them(source, tmp_path, packed):
    if packed:
        archive = tmp_path / "vllm.tar.gz"
        with tarfile.open(archive, "w:gz") as packing:
            packing.add(source, arcname=source.name)
    work = tmp_path / "work"
    (work / "tests").mkdir(parents=True)
    (work / "tests" / "old.py").write_text("of another version")
    take_tests(archive if packed else source, work)
    assert files_in(work) == ["examples/proxy.py", "tests/__init__.py", "tests/v1/test_a.py"]


def test_what_passes_only_without_the_series_is_worse_unless_it_is_known(monkeypatch):
    monkeypatch.setattr(upstream_tests, "KNOWN", {"m::meant": "a reason", "m::over": "a reason"})
    before = dict.fromkeys(["m::fine", "m::broken", "m::gone", "m::meant", "m::over"], "passed")
    before |= {"m::gpu": "failed", "m::cured": "failed"}
    after = {**before, "m::broken": "failed", "m::meant": "failed", "m::cured": "passed"}
    del after["m::gone"]
    assert compare(before, after) == (["m::broken", "m::gone"], ["m::over"])


@pytest.mark.parametrize(
    ("inside", "outcome"), [("", "passed"), ("<failure/>", "failed"), ("<error/>", "failed"), ("<skipped/>", "skipped")]
)
def test_an_error_in_a_fixture_is_a_failure(inside, outcome):
    assert outcome_of(ElementTree.fromstring(f"<testcase>{inside}</testcase>")) == outcome


def test_a_module_that_cannot_be_imported_has_a_name():
    assert name_of(ElementTree.fromstring('<testcase classname="" name="tests.v1.test_a"/>')) == "tests.v1.test_a"
    assert name_of(ElementTree.fromstring('<testcase classname="m.TestX" name="a[1]"/>')) == "m.TestX::a[1]"


def test_the_file_of_a_test_is_found_from_its_name(source):
    for name in "tests.v1.test_a", "tests.v1.test_a::one[a.b]", "tests.v1.test_a.TestX::two":
        assert file_of(name, source) == "tests/v1/test_a.py"


def test_what_is_left_out_is_in_the_set_and_has_a_reason():
    assert all(any(path.startswith(f"{chosen}/") for chosen in TESTS) and reason for path, reason in LEFT_OUT.items())


def test_requirements_that_have_changed_are_installed_again(tmp_path, monkeypatch):
    installed = []

    def install(command, what):
        target = Path(command[command.index("--target") + 1])
        target.mkdir()
        installed.append(command[-1])

    monkeypatch.setattr(upstream_tests, "run", install)
    for requirement in "tblib==1", "tblib==1", "tblib==2":
        pip_install(tmp_path / "site", requirement)
    assert installed == ["tblib==1", "tblib==2"]


LEAK = """
import pytest
import sys

@pytest.mark.parametrize("number", range(4))
def test_leak(number):
    sys.leak = True
"""
"""Of two files the one with more tests runs first."""
TESTS_OF_TWO_SIDES = """
import sys
from importlib.util import find_spec

IS_PATCHED = find_spec("unpatched_marker") is None

def test_that_depends_on_what_ran_before():
    assert not (IS_PATCHED and hasattr(sys, "leak"))

def test_that_the_series_breaks():
    assert not IS_PATCHED

def test_that_fails_on_a_deep_recursion():
    test_that_fails_on_a_deep_recursion()
"""


@pytest.mark.slow
def test_what_looks_worse_counts_only_if_it_is_when_its_file_runs_alone(tmp_path, monkeypatch, capsys):
    """Real runs of pytest, on two sides that differ in a module."""
    source, work, unpatched = tmp_path / "source", tmp_path / "work", tmp_path / "unpatched"
    (source / "tests").mkdir(parents=True)
    (source / "tests" / "test_1.py").write_text(LEAK)
    (source / "tests" / "test_2.py").write_text(TESTS_OF_TWO_SIDES)
    unpatched.mkdir()
    (unpatched / "unpatched_marker.py").touch()
    (work / "site").mkdir(parents=True)
    (work / "site" / f"{upstream_tests.PLUGIN}.py").touch()
    for name in "prepare_site", "make_models", "check_set":
        monkeypatch.setattr(upstream_tests, name, lambda *arguments: None)
    monkeypatch.setattr(upstream_tests, "make_unpatched", lambda work: unpatched)
    # With two jobs each file would have a process of its own.
    assert main(["--source", str(source), "--work", str(work), "--jobs", "1", "tests"]) == 1
    said = capsys.readouterr().out
    assert "2 tests look worse" in said
    assert "worse: tests.test_2::test_that_the_series_breaks: passed before, failed after" in said
    assert said.count("\nworse: ") == 1
    assert "before: 6 passed, 1 failed\nafter: 5 passed, 2 failed\n" in said


def test_a_set_that_names_what_the_source_does_not_have_is_refused(source, tmp_path, capsys):
    assert main(["--source", str(source), "--work", str(tmp_path / "work")]) == 1
    assert "correct devtools/upstream_set.py" in capsys.readouterr().err


def test_a_run_that_does_not_end_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(upstream_tests, "LIMIT_S", 0.1)
    with (
        open(tmp_path / "side.log", "w") as log,
        pytest.raises(PatchError, match=r"did not end in 0\.1 s: see .*side\.log"),
    ):
        upstream_tests.run_logged([sys.executable, "-c", "import time; time.sleep(60)"], log)
