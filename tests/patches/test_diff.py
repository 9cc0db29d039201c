# SPDX-License-Identifier: Apache-2.0
"""The diff reader and applier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patches.trees import A, diff_of
from vllm_overlay.patching.diff import PatchError, parse

OLD = "".join(f"line {n}\n" for n in range(30))
NEW = OLD.replace("line 10\n", "ten\n")
GOOD = diff_of(A, OLD, NEW)


def one(text: str):
    (diff,) = parse(text.encode(), "0001-x.patch")
    return diff


@given(st.lists(st.sampled_from("abc-+@ "), max_size=12), st.lists(st.sampled_from("abc-+@ "), max_size=12))
def test_any_changed_lines_are_applied(before, after):
    old, new = ("".join(f"{line}\n" for line in ["top", *lines, "end"]) for lines in (before, after))
    if old != new:
        assert one(diff_of(A, old, new)).apply(old.encode()) == new.encode()


def test_several_hunks_each_go_to_their_line_of_the_old_file():
    new = NEW.replace("line 3\n", "3\n3\n3\n").replace("line 20\n", "")
    diff = one("Description: a header\n\n" + diff_of(A, OLD, new))
    assert len(diff.hunks) == 2
    assert diff.apply(OLD.encode()) == new.encode()


def test_only_a_line_feed_ends_a_line():
    text = f"+++ b/{A}\n@@ -1,2 +1,2 @@\n one\r\n-two\r\n+2\r\n"
    assert one(text).apply(b"one\r\ntwo\r\n") == b"one\r\n2\r\n"
    with pytest.raises(PatchError):
        one(text).apply(b"one\ntwo\n")


@pytest.mark.parametrize("content", [OLD.replace("line 12\n", "line twelve\n"), "top\n" + OLD, "", OLD[:60]])
def test_lines_that_are_not_at_their_place_are_refused(content):
    with pytest.raises(PatchError, match=rf"{A}: the hunk of line 8 does not match"):
        one(GOOD).apply(content.encode())


def test_what_is_no_diff_is_refused_with_its_line():
    with pytest.raises(PatchError, match=r"0001-x\.patch line 13: not part of a diff: b'\*'"):
        parse((GOOD + "*").encode(), "0001-x.patch")
