# SPDX-License-Identifier: Apache-2.0
"""The diff reader and applier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patches.trees import A, diff_of
from vllm_overlay.patching.diff import ConflictError, PatchError, parse

OLD = "".join(f"line {n}\n" for n in range(30))
NEW = OLD.replace("line 10\n", "ten\n")
GOOD = diff_of(A, OLD, NEW)


def one(text: str):
    (diff,) = parse(text.encode(), "0001-x.patch")[1]
    return diff


def test_a_diff_gives_the_new_file_and_taken_back_the_old_one():
    assert one(GOOD).apply(OLD.encode()) == NEW.encode()
    assert one(GOOD).reversed().apply(NEW.encode()) == OLD.encode()


def test_a_diff_taken_back_knows_its_lines():
    new = NEW.replace("line 3\n", "3\n3\n3\n").replace("line 20\n", "")
    diff = one(diff_of(A, OLD, new))
    assert len(diff.hunks) == 2
    assert diff.locate(OLD.encode())[1] == (0, 0)
    assert diff.reversed().locate(new.encode())[1] == (0, 0)


@given(st.lists(st.sampled_from("abc\r"), max_size=12), st.lists(st.sampled_from("abc\r"), max_size=12), st.booleans())
def test_any_two_texts_roundtrip(before, after, ends):
    old = "top\n" + "\n".join(before) + "\n" * ends
    new = "top\n" + "\n".join(after) + "\n" * ends
    # A hunk needs a line to hold on to, and difflib splits at \r as well.
    if old == new or "\r" in old + new:
        return
    diff = one(diff_of(A, old, new))
    assert diff.apply(old.encode()) == new.encode()
    assert diff.reversed().apply(new.encode()) == old.encode()


def test_carriage_returns_are_part_of_a_line():
    text = f"--- a/{A}\n+++ b/{A}\n@@ -1,2 +1,2 @@\n one\r\n-two\r\n+2\r\n"
    assert one(text).apply(b"one\r\ntwo\r\n") == b"one\r\n2\r\n"
    with pytest.raises(ConflictError):
        one(text).apply(b"one\ntwo\n")


def test_a_changed_context_line_is_a_conflict():
    with pytest.raises(ConflictError, match="hunk 1"):
        one(GOOD).apply(OLD.replace("line 12\n", "line twelve\n").encode())


def test_a_moved_hunk_goes_to_the_only_place_that_matches():
    fresh, offsets = one(GOOD).locate(("top\n" * 5 + OLD).encode())
    assert fresh == ("top\n" * 5 + NEW).encode()
    assert offsets == (5,)


def test_a_moved_hunk_with_two_places_is_a_conflict():
    with pytest.raises(ConflictError):
        one(GOOD).apply(("top\n" + OLD + OLD).encode())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("vllm/a.py", "vllm/../a.py"), "not of the form"),
        (GOOD.replace("vllm/a.py", "../vllm/a.py"), "not of the form"),
        (GOOD.replace("vllm/a.py", "vllm/./a.py"), "not of the form"),
        (GOOD.replace("a/vllm/a.py", "/etc/passwd").replace("b/vllm/a.py", "/etc/passwd"), "not of the form"),
        (GOOD.replace("vllm/a.py", "vllm//a.py"), "not of the form"),
        (GOOD.replace("vllm/a.py", "setup.py"), "not of the form"),
        (GOOD.replace("vllm/a.py", "vllm/a\\..\\b.py"), "not of the form"),
        (GOOD.replace("+++ b/vllm/a.py", "+++ b/vllm/b.py"), "different files"),
        (GOOD.replace("--- a/vllm/a.py", "--- /dev/null"), "creates or deletes"),
        (GOOD.replace("+++ b/vllm/a.py", "+++ /dev/null"), "creates or deletes"),
        (GOOD.replace("--- a", "new file mode 100644\n--- a"), "creates a file"),
        (GOOD.replace("--- a", "deleted file mode 100644\n--- a"), "deletes a file"),
        (GOOD.replace("--- a", "old mode 100644\nnew mode 100755\n--- a"), "file mode"),
        (GOOD.replace("--- a", "rename from vllm/x.py\n--- a"), "renames"),
        (GOOD.replace("--- a", "GIT binary patch\n--- a"), "binary"),
        (GOOD + GOOD, "comes twice"),
        (GOOD.replace("@@ -8,7 +8,7 @@", "@@ -8,7 +8,9 @@"), "fewer or other lines"),
        (GOOD.replace("@@ -8,7 +8,7 @@", "@@ -8,6 +8,6 @@"), "not part of a diff"),
        (GOOD + "-- \n2.40\n", "--no-signature"),
        (f"--- a/{A}\n+++ b/{A}\n@@ -0,0 +1 @@\n+x\n", "without a line of context"),
        (f"--- a/{A}\n+++ b/{A}\n", "no hunk"),
        ("Description: nothing\n", "holds no diff"),
    ],
)
def test_what_the_series_cannot_hold_is_refused_with_its_place(text, said):
    with pytest.raises(PatchError, match=r"0001-x\.patch") as error:
        parse(text.encode(), "0001-x.patch")
    assert said in str(error.value)
