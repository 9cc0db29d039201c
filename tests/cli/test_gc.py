# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay gc``: what it removes, in which order, and what it leaves alone."""

import contextlib
import os
import shutil
import signal
import sqlite3
import time

import pytest

from tests.cli.commands import member, names, path_of, remove_catalogue, run
from tests.tiers.disk.files import bytes_under, object_files, on_disk
from tests.tiers.disk.foreign import contents_of
from tests.tiers.disk.objects import chain, conversations
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from vllm_overlay import cli
from vllm_overlay.tiers.disk.catalogue import Catalogue, Namespace, Scored
from vllm_overlay.tiers.disk.catalogue.generations import begin
from vllm_overlay.tiers.disk.files import listing
from vllm_overlay.tiers.disk.files.checksum import XXH3
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.maintenance import completion, gc
from vllm_overlay.tiers.disk.maintenance.catalogue_access import without_interruption
from vllm_overlay.tiers.disk.maintenance.completion import adopt_all

P, Q = chain("p", 4), chain("q", 2)


def test_gc_removes_what_was_not_used_for_longest_leaves_first_and_stops_at_the_limit(root, capsys):
    with member(root) as catalogue:
        catalogue.touch(names(P), 2000)
        catalogue.touch(names(Q, OTHER_NAMESPACE), 1000)  # stored last, used first
    status, done = run(capsys, "gc", root, "--max-bytes", 6 * on_disk())
    assert status == 0
    assert (done["removed_files"], done["bytes_before"], done["bytes_after"]) == (2, 8 * on_disk(), 6 * on_disk())
    assert bytes_under(root) == 6 * on_disk()
    assert [path_of(root, planned, OTHER_NAMESPACE).exists() for planned in Q] == [True, False, False]
    assert run(capsys, "fsck", root)[1]["findings"] == []
    assert run(capsys, "gc", root, "--max-bytes", 0)[0] == 0
    assert object_files(root) == []
    assert run(capsys, "fsck", root)[1]["findings"] == []


def test_gc_leaves_every_prefix_whole_over_namespaces_with_shared_prefixes(tmp_path, capsys):
    root = tmp_path / "root"
    prompts = conversations(count=4, shared=3, own=2)
    stored = list(dict.fromkeys(planned for prompt in prompts for planned in prompt))
    for namespace in (None, OTHER_NAMESPACE):
        with tier_pair(root, **({"namespace": namespace} if namespace else {})) as made:
            made.store(stored)
    total = bytes_under(root)
    for left in range(2 * len(stored) - 3, -1, -3):
        assert run(capsys, "gc", root, "--max-bytes", left * on_disk())[0] == 0
        status, report = run(capsys, "fsck", root)
        assert (status, report["findings"]) == (0, [])
        assert left - 3 < report["num_objects"] <= left
        assert bytes_under(root) == report["num_bytes"] < total


def test_a_dry_run_says_what_would_go_and_changes_no_byte(root, capsys):
    before = contents_of(root)
    status, done = run(capsys, "gc", root, "--max-bytes", 0, "--dry-run")
    assert (status, done["removed_files"], done["removed_bytes"]) == (0, 8, 8 * on_disk())
    _, done = run(capsys, "gc", root, "--max-bytes", 6 * on_disk(), "--dry-run")
    assert (done["removed_files"], done["bytes_after"]) == (2, 6 * on_disk())
    assert contents_of(root) == before


def test_a_dry_run_forgets_no_score_that_has_expired(root, capsys):
    with member(root) as catalogue:
        catalogue.publish_scores([Scored(names(P)[4], 5.0, until=1e10)], expires_at=1)
    before = contents_of(root)
    run(capsys, "gc", root, "--max-bytes", 0, "--dry-run")
    assert contents_of(root) == before


def test_gc_leaves_alone_what_is_served(root, capsys):
    with tier_pair(root) as made:
        made.recovered()
        made.store(chain("new", 1))
        made.settled()
        status, done = run(capsys, "gc", root, "--max-bytes", 0)
        assert (status, done["removed_files"], done["in_use_bytes"]) == (1, 3, 7 * on_disk())
        assert made.reasons([*P, *chain("new", 1)]) == [""] * 7
        assert made.coverage([*P, *chain("new", 1)]) == [True] * 7
        made.store(chain("newer", 1))
        assert cli.main(["gc", str(root), "--max-bytes", "1 KiB", "--dry-run"]) == 1
        assert "served now" in capsys.readouterr().out


@pytest.mark.parametrize("is_begun", [False, True])
def test_gc_of_a_root_without_a_whole_catalogue_makes_one_from_the_files(root, capsys, is_begun):
    remove_catalogue(root)
    if is_begun:
        begin(str(root), 1)
    assert cli.main(["gc", str(root), "--max-bytes", str(5 * on_disk())]) == 0
    assert "recovered 8 objects" in capsys.readouterr().err
    assert len(object_files(root)) == 5
    assert run(capsys, "fsck", root)[1]["findings"] == []


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_dry_run_without_a_whole_catalogue_makes_none(root, capsys, is_begun):
    remove_catalogue(root)
    if is_begun:
        begin(str(root), 1)
        with contextlib.closing(Catalogue(str(root))):  # makes the file of its users
            pass
    before = contents_of(root)
    status, done = run(capsys, "gc", root, "--max-bytes", 5 * on_disk(), "--dry-run")
    assert (status, done["removed_files"], done["bytes_after"]) == (0, 3, 5 * on_disk())
    assert contents_of(root) == before


def test_gc_waits_for_the_process_that_rebuilds_the_catalogue(root, monkeypatch):
    remove_catalogue(root)
    with member(root) as other:
        assert other.begin_rebuild()

        def rebuild(seconds):
            adopt_all(other, str(root), Device(), XXH3)
            other.end_rebuild()

        monkeypatch.setattr(completion.time, "sleep", rebuild)
        assert gc.collect(str(root), 5 * on_disk()).removed_files == 3


def test_a_rebuild_that_was_interrupted_is_begun_again(root, monkeypatch):
    remove_catalogue(root)

    def interrupt(catalogue, batch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Catalogue, "adopt", interrupt)
        gc.collect(str(root), 0)
    with member(root) as catalogue:
        assert catalogue.dead_members() == []
        assert not catalogue.totals().is_complete
    assert len(object_files(root)) == 8
    assert gc.collect(str(root), 5 * on_disk()).removed_files == 3


def test_gc_asks_for_the_key_only_to_rebuild_a_catalogue(keyed, capsys):
    root = keyed.root
    assert run(capsys, "gc", root, "--max-bytes", 4 * on_disk())[1]["removed_files"] == 1
    remove_catalogue(root)
    files = object_files(root)
    assert cli.main(["gc", str(root), "--max-bytes", "0"]) == 2
    assert "give --integrity-key-file" in capsys.readouterr().err
    assert object_files(root) == files
    assert run(capsys, "gc", root, "--max-bytes", 0, "--integrity-key-file", keyed.key_file)[0] == 0
    assert object_files(root) == []


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_damaged_catalogue_is_one_sentence_that_says_what_to_do(root, capsys, options):
    (root / "catalogue-1.sqlite").write_bytes(b"garbage" * 1000)
    assert cli.main(["gc", str(root), "--max-bytes", "0", *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"run `vllm-overlay fsck --repair {root}`" in said
    assert len(object_files(root)) == 8


def test_a_catalogue_that_is_locked_is_one_sentence_that_names_the_holder(root, capsys, monkeypatch):
    monkeypatch.setattr(Catalogue.__init__, "__defaults__", (0.1,))
    with contextlib.closing(sqlite3.connect(root / "catalogue-1.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        assert cli.main(["gc", str(root), "--max-bytes", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"is locked by process {os.getpid()}" in said
    assert len(object_files(root)) == 8


def test_a_file_that_cannot_be_removed_still_counts(root):
    class Refusing(Device):
        def unlink(self, path):
            if path == str(path_of(root, P[4])):
                raise OSError(5, "Input/output error")
            super().unlink(path)

    assert gc.collect(str(root), 0, device=Refusing()).bytes_after == on_disk()
    with member(root) as catalogue:
        (dead,) = catalogue.dead_members()
        assert [removal.name for removal in dead.removals] == names(P[4:])


def forge_a_ring(monkeypatch):
    """From now on the headers of all objects of "p" say that they depend on each other."""
    ring = tuple(planned.object_id for planned in P)
    read_header = listing._read_header

    def forged(device, path, readers):
        header = read_header(device, path, readers)
        parents = ring if header.object_id in ring else header.parents
        return type(header)(**{name: getattr(header, name) for name in header.__slots__} | {"parents": parents})

    monkeypatch.setattr(listing, "_read_header", forged)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize(("num_kept", "num_removed"), [(8, 0), (6, 2), (3, 5), (2, 6)])
def test_forged_files_that_depend_on_each_other_go_first_and_only_as_many_as_must(
    root, capsys, monkeypatch, options, num_kept, num_removed
):
    for path in object_files(root):
        os.utime(path, (1000, 1000))
    forge_a_ring(monkeypatch)
    remove_catalogue(root)
    status, done = run(capsys, "gc", root, "--max-bytes", num_kept * on_disk(), *options)
    assert (status, done["removed_files"], done["bytes_after"]) == (0, num_removed, num_kept * on_disk())
    if not options:
        assert len(object_files(root)) == num_kept
        assert sum(path_of(root, each, OTHER_NAMESPACE).exists() for each in Q) == min(3, num_kept)


def test_files_of_no_object_stay_while_somebody_may_be_writing_them(root, monkeypatch):
    for path in object_files(root):
        os.utime(path, (time.time() - 60,) * 2)
    forge_a_ring(monkeypatch)
    remove_catalogue(root)
    with member(root):
        assert gc.collect(str(root), 0).removed_files == 3
    assert len(object_files(root)) == 5


def test_a_rebuild_believes_who_serves_where_parents_lie(root):
    """No file says it: namespace.json and the chunks are gone."""
    shutil.rmtree(root / NAMESPACE.attention)
    (root / NAMESPACE.snapshot / "namespace.json").unlink()
    remove_catalogue(root)
    with contextlib.closing(Catalogue(str(root))) as server:
        server.join([Namespace(NAMESPACE.snapshot, NAMESPACE.attention)], 1)
        assert gc.collect(str(root), 3 * on_disk()).bytes_after == 3 * on_disk()


def test_ctrl_c_in_a_call_on_the_catalogue_counts_after_it():
    answers = []

    def call():
        signal.raise_signal(signal.SIGINT)
        answers.append("whole")

    with pytest.raises(KeyboardInterrupt):
        without_interruption(call)
    assert answers == ["whole"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
