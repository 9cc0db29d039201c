# SPDX-License-Identifier: Apache-2.0
"""What --check says of trees of any version."""

from devtools.validate_patches import validate
from tests.patches.trees import ORIGINALS, A, B, C, contents, make_series, make_tree
from vllm_overlay.patching.check import PatchOutcome, check
from vllm_overlay.patching.series import load
from vllm_overlay.patching.tree import apply


def test_check_tells_what_applies_is_there_or_conflicts(tree, series):
    make_tree(tree, version="0.33.0")
    (tree / B).write_text(ORIGINALS[B].replace("b = 30\n", "").replace("b = 7\n", "b = 70\n"))
    report = check(tree, series)
    assert dict(report.outcomes) == {
        "0001-first.patch": PatchOutcome.CONFLICTS,
        "0002-second.patch": PatchOutcome.ALREADY_THERE,
        "0003-third.patch": PatchOutcome.APPLIES,
    }
    assert "hunk 1" in report.reasons["0001-first.patch"]
    assert not report.would_apply and "0.33.0" in report.refusal
    assert contents(tree)[B] == (tree / B).read_bytes()


def test_check_says_which_conflicts_may_only_follow_from_others(tree, series):
    make_tree(tree, version="0.33.0")
    (tree / B).write_text(ORIGINALS[B].replace("b = 7\n", "b = 70\n").replace("b = 30\n", "b = 300\n"))
    reasons = check(tree, series).reasons
    assert "did not apply" not in reasons["0001-first.patch"]
    assert reasons["0002-second.patch"].endswith("(where 0001 did not apply either)")


def test_check_knows_a_cure_of_upstream_by_its_sign(tree, tmp_path):
    source = make_tree(tmp_path / "source")
    series = make_series(tmp_path / "patches", source, {"0001-x.patch": {A: ("a = 5\n", "a = 'five'\n")}})
    patch = series.directory / "0001-x.patch"
    patch.write_text(patch.read_text().replace("none: it is a test", "vllm/a.py: def cure("))
    assert validate(source, update=True, directory=series.directory) == []
    series = load(series.directory)
    make_tree(tree, version="0.33.0")
    (tree / A).write_text("def cure():\n    pass\n")
    assert check(tree, series).outcomes["0001-x.patch"] is PatchOutcome.NO_LONGER_NEEDED


def test_a_file_that_another_version_lacks_is_a_conflict(tree, series):
    make_tree(tree, version="0.33.0")
    (tree / C).unlink()
    report = check(tree, series)
    assert report.outcomes["0003-third.patch"] is PatchOutcome.CONFLICTS
    assert "missing" in report.reasons["0003-third.patch"]


def test_check_of_a_tree_with_another_series_says_what_apply_would_do(tree, series, tmp_path):
    other = {"0001-other.patch": {B: ("b = 7\n", "b = 'other'\n")}}
    apply(tree, make_series(tmp_path / "other", make_tree(tmp_path / "s"), other))
    report = check(tree, series)
    assert report.would_apply and set(report.outcomes.values()) == {PatchOutcome.APPLIES}
    assert report.reasons["0002-second.patch"] == f"in place of another series' in {B}"
    assert apply(tree, series).is_applied
    assert set(check(tree, series).outcomes.values()) == {PatchOutcome.ALREADY_THERE}
