# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests before and after the series: what counts as worse, and where the tests come from."""

import tarfile
import xml.etree.ElementTree as ElementTree

import pytest

from devtools import upstream_tests
from devtools.upstream_tests import compare, outcome_of, table, take_tests


@pytest.fixture
def source(tmp_path):
    """An unpacked source distribution in small."""
    root = tmp_path / "vllm-0.32.0"
    for path in "tests/v1/test_a.py", "tests/__init__.py", "vllm/__init__.py", "vllm/tests/test_b.py":
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
    assert files_in(work) == ["tests/__init__.py", "tests/v1/test_a.py"]


def test_what_passes_only_without_the_series_is_worse_unless_it_is_known(monkeypatch):
    monkeypatch.setattr(upstream_tests, "KNOWN", {"m::meant": "a reason", "m::over": "a reason"})
    before = dict.fromkeys(["m::fine", "m::broken", "m::gone", "m::meant", "m::over"], "passed")
    before |= {"m::gpu": "failed", "m::cured": "failed"}
    after = {**before, "m::broken": "failed", "m::meant": "failed", "m::cured": "passed"}
    del after["m::gone"]
    assert compare(before, after) == (["m::broken", "m::gone"], ["m::over"])


def test_a_class_counts_with_its_module():
    outcomes = {"m.TestX::a": "passed", "m::b": "failed", "n::c": "skipped"}
    rows = table(outcomes, outcomes).splitlines()[2:]
    assert rows[0] == "| m | 1 passed, 1 failed | 1 passed, 1 failed |"
    assert rows[-1] == "| all | 1 passed, 1 failed, 1 skipped | 1 passed, 1 failed, 1 skipped |"


@pytest.mark.parametrize(
    ("inside", "outcome"), [("", "passed"), ("<failure/>", "failed"), ("<error/>", "failed"), ("<skipped/>", "skipped")]
)
def test_an_error_in_a_fixture_is_a_failure(inside, outcome):
    assert outcome_of(ElementTree.fromstring(f"<testcase>{inside}</testcase>")) == outcome
