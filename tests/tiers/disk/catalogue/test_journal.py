# SPDX-License-Identifier: Apache-2.0
"""A catalogue where several hosts may see the root: the same, with a rollback journal."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import member
from vllm_overlay.tiers.disk.catalogue import Damaged, journal
from vllm_overlay.tiers.disk.catalogue.generations import path_of

MOUNTS = r"""22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:30 / /mnt/share rw shared:1 - nfs4 server:/x rw
31 30 0:31 / /mnt/share/local rw - tmpfs tmpfs rw
32 22 0:32 / /mnt/with\040space rw - fuse.sshfs a:/ rw
33 22 0:33 / /mnt/grün rw - nfs4 server:/y rw
34 22 0:34 / /mnt/\134xff rw - nfs4 server:/z rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "mode"),
    [
        ("/var/cache", "ext4", "wal"),
        ("/mnt/share", "nfs4", "delete"),
        ("/mnt/share/root", "nfs4", "delete"),
        ("/mnt/shared", "ext4", "wal"),
        ("/mnt/share/local/root", "tmpfs", "wal"),
        ("/mnt/with space/root", "fuse.sshfs", "delete"),
        ("/mnt/grün/root", "nfs4", "delete"),
        (r"/mnt/\xff/root", "nfs4", "delete"),
    ],
)
def test_the_journal_goes_by_what_is_mounted(tmp_path, monkeypatch, path: str, kind: str, mode: str) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(journal, "_MOUNTS", tmp_path / "mountinfo")
    assert (journal.file_system_type(path), journal.journal_mode(path)) == (kind, mode)


def test_without_a_list_of_mounts_a_root_is_taken_to_be_local(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(journal, "_MOUNTS", tmp_path / "none")
    assert journal.journal_mode(str(tmp_path)) == "wal"


WRITER = """
import sys
from tests.tiers.disk.catalogue.objects import MIB, member, stored
from vllm_overlay.tiers.disk.catalogue import journal
from pathlib import Path
journal.journal_mode = lambda root: "delete"
made = member(Path(sys.argv[1]))
first = int(sys.argv[2])
made.grant(8 * MIB, 8 * MIB, 1024 * MIB)
for number in range(first, first + 100):
    assert made.commit([stored(number)]).refused == []
    made.totals()
made.close()
"""


def test_processes_share_a_catalogue_with_a_rollback_journal(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(journal, "journal_mode", lambda root: "delete")
    made = member(tmp_path)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(1000 * turn)]) for turn in (1, 2, 3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert made.totals().num_objects == 300
    assert check(made) == []
    assert not list(tmp_path.glob("*-wal"))
    made.close()


def test_a_catalogue_that_moved_to_another_kind_of_file_system_is_made_anew(tmp_path: Path, monkeypatch) -> None:
    member(tmp_path).close()
    monkeypatch.setattr(journal, "journal_mode", lambda root: "delete")
    with pytest.raises(Damaged, match="journal"):
        member(tmp_path)
    assert sqlite3.connect(path_of(str(tmp_path), 1)).execute("PRAGMA journal_mode").fetchone() == ("wal",)
