# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay gc``: what it removes, in which order, and what it leaves alone."""

import os

from tests.cli.commands import contents, path_of, run
from tests.tiers.disk.files import bytes_under, object_files, on_disk
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import tier_pair
from vllm_overlay import cli


def test_gc_removes_the_oldest_leaves_first_and_stops_at_the_limit(root, capsys):
    for age, path in enumerate(object_files(root)):
        os.utime(path, (1_000_000 + age,) * 2)
    for planned in chain("p", 4):  # older than the other namespace, parents older than children
        os.utime(path_of(root, planned), (1000 + planned.end_tokens,) * 2)
    status, done = run(capsys, "gc", root, "--max-bytes", 5 * on_disk())
    assert status == 0
    assert (done["removed_files"], done["bytes_after"]) == (3, 5 * on_disk())
    assert bytes_under(root) == 5 * on_disk()
    assert [path_of(root, planned).exists() for planned in chain("p", 4)] == [True, True, False, False, False]
    assert run(capsys, "fsck", root)[1]["findings"] == []
    assert run(capsys, "gc", root, "--max-bytes", 0)[0] == 0
    assert object_files(root) == []


def test_a_dry_run_changes_nothing(root, capsys):
    before = {path: state.st_mtime_ns for path, state in contents(root).items()}
    status, done = run(capsys, "gc", root, "--max-bytes", 0, "--dry-run")
    assert (status, done["removed_files"], done["removed_bytes"]) == (0, 8, 8 * on_disk())
    assert {path: state.st_mtime_ns for path, state in contents(root).items()} == before


def test_gc_leaves_alone_what_is_served(root, capsys):
    with tier_pair(root) as made:
        made.recovered()
        made.store(chain("new", 1))
        status, done = run(capsys, "gc", root, "--max-bytes", 0)
        assert (status, done["removed_files"], done["in_use_bytes"]) == (1, 3, 7 * on_disk())
        assert made.reasons([*chain("p", 4), *chain("new", 1)]) == [""] * 7
        assert cli.main(["gc", str(root), "--max-bytes", "1 KiB", "--dry-run"]) == 1
        assert "served now" in capsys.readouterr().out


def test_forged_files_that_depend_on_each_other_go_too(root, monkeypatch):
    def everybody(device, path, integrity):
        header = read_header(device, path, integrity)
        return type(header)(**{name: getattr(header, name) for name in header.__slots__} | {"parents": ring})

    read_header = listing.read_header
    ring = tuple(planned.object_id for planned in chain("p", 4))
    monkeypatch.setattr(listing, "read_header", everybody)
    assert gc.collect(str(root), 0).removed_files == 8
