# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-overlay`` command: what it finds, what it changes, what it leaves alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers.disk.files import bytes_under, object_files, on_disk
from tests.tiers.disk.objects import OBJECT, chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, TierPair, tier_pair
from vllm_overlay.cli import main as cli
from vllm_overlay.tiers.disk import fsck, gc
from vllm_overlay.tiers.disk.device import Device, temporary_name
from vllm_overlay.tiers.disk.ledger import Ledger

REPOSITORY = Path(__file__).parents[3]
FORBID = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm"):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Forbid())
from vllm_overlay.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def root(tmp_path):
    """Two namespaces that nobody serves: a chain of 4 chunks and a snapshot, and one of 2."""
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 4))
    with tier_pair(root, namespace=OTHER_NAMESPACE) as made:
        made.store(chain("q", 2))
    return root


def run(capsys, *arguments):
    """Exit status and the JSON that was printed."""
    capsys.readouterr()
    status = cli.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def findings(report):
    return sorted((Path(found["path"]).name, found["what"], found["is_problem"]) for found in report["findings"])


def path_of(root, planned, namespace=NAMESPACE):
    return Path(namespace.path_of(str(root), planned.object_id, 0))


def contents(root):
    return {path: path.lstat() for path in sorted(root.rglob("*"))}


# Without an engine.


@pytest.mark.parametrize("command", [["stats"], ["fsck"], ["fsck", "--repair"], ["gc", "--max-bytes", "0"]])
def test_it_needs_neither_torch_nor_vllm(root, command):
    done = subprocess.run(
        [sys.executable, "-c", FORBID, *command, str(root)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("command", [["stats"], ["fsck"], ["gc", "--max-bytes", "0"]])
def test_a_root_that_is_not_there_is_wrong_usage(tmp_path, capsys, command):
    assert cli.main([*command, str(tmp_path / "gone")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["fsck"], ["gc", "ROOT"], ["fly", "ROOT"]])
def test_wrong_usage_has_status_2(command):
    with pytest.raises(SystemExit) as left:
        cli.main(command)
    assert left.value.code == 2


def test_a_limit_that_is_no_size_is_wrong_usage(root, capsys):
    assert cli.main(["gc", str(root), "--max-bytes", "much"]) == 2
    assert "--max-bytes='much' is not a size" in capsys.readouterr().err


def test_help_says_what_each_exit_status_means(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for status in ("0    fsck", "1    fsck", "2    wrong usage", "130  interrupted"):
        assert f"\n  {status}" in shown


# stats


def test_stats_say_whose_what_and_how_much(root, capsys):
    status, stats = run(capsys, "stats", root)
    assert status == 0
    assert stats["num_bytes"] == bytes_under(root) == 8 * on_disk()
    by_name = {namespace["fingerprint"]: namespace for namespace in stats["namespaces"]}
    assert set(by_name) == {*NAMESPACE.fingerprints, *OTHER_NAMESPACE.fingerprints}
    chunks = by_name[NAMESPACE.attention]
    assert chunks["kinds"] == {"f0": [4, 4, 4 * on_disk()]}
    assert (chunks["model"], chunks["is_in_use"]) == ("tiny", False)
    assert chunks["oldest"] <= chunks["newest"] <= time.time()
    assert [num_bytes for _, num_bytes in chunks["largest"]] == [on_disk()] * 4
    assert (root / chunks["largest"][0][0]).exists()
    assert by_name[OTHER_NAMESPACE.snapshot]["kinds"] == {"s": [1, 1, on_disk()]}


def test_stats_for_people_name_models_and_kinds(root, capsys):
    assert cli.main(["stats", str(root)]) == 0
    shown = capsys.readouterr().out
    for words in ("model tiny, served by nobody", "4 chunks of full attention group 0 in 4 files", "1 snapshots"):
        assert words in shown


def test_stats_see_who_serves(root, capsys):
    with tier_pair(root) as made:
        made.store(chain("new", 1))
        _, stats = run(capsys, "stats", root)
    served = {namespace["fingerprint"] for namespace in stats["namespaces"] if namespace["is_in_use"]}
    assert served == set(NAMESPACE.fingerprints)


# fsck


def test_a_sound_root_has_status_0_and_is_not_touched(root, capsys):
    before = contents(root)
    status, report = run(capsys, "fsck", root)
    assert (status, report["findings"]) == (0, [])
    assert (report["num_objects"], report["num_files"], report["num_namespaces"]) == (8, 8, 4)
    assert report["num_bytes"] == 8 * on_disk()
    after = contents(root)
    assert {path: (state.st_mtime_ns, state.st_ino) for path, state in after.items()} == {
        path: (state.st_mtime_ns, state.st_ino) for path, state in before.items()
    }


def flip(path, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def damage(root, kind):
    """Breaks the snapshot of "p" and returns its path."""
    path = path_of(root, chain("p", 4)[4])
    if kind in ("header", "payload", "padding"):
        flip(path, {"header": 17, "payload": 4096 + OBJECT - 1, "padding": 4096 + OBJECT}[kind])
    elif kind == "short":
        os.truncate(path, 4096 + 100)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "long":
        os.truncate(path, on_disk() + 4096)
    elif kind == "swapped":
        shutil.copy(path_of(root, chain("q", 2)[2], OTHER_NAMESPACE), path)
    elif kind == "link":
        path.rename(root.parent / "elsewhere")
        path.symlink_to(root.parent / "elsewhere")
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "place":
        wrong = path.parent.parent / ("00" if path.parent.name != "00" else "01") / path.name
        wrong.parent.mkdir(mode=0o700)
        return path.rename(wrong)
    return path


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("header", "header"), ("payload", "checksum"), ("padding", "checksum"), ("short", "size"), ("empty", "size"),
        ("long", "size"), ("swapped", "header"), ("link", "header"), ("pipe", "header"), ("place", "place"),
    ],
)  # fmt: skip
def test_what_does_not_verify_is_found_and_repair_removes_it_and_nothing_else(root, capsys, kind, what):
    others = [path for path in object_files(root) if path != path_of(root, chain("p", 4)[4])]
    path = damage(root, kind)
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert (path.name, what, True) in findings(report)
    assert os.path.lexists(path)
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, report["num_problems_left"]) == (0, 0)
    assert not os.path.lexists(path)
    assert object_files(root) == sorted(others)
    assert run(capsys, "fsck", root)[1]["num_problems"] == 0
    assert (root.parent / "elsewhere").exists() == (kind == "link")


def test_what_lies_on_top_of_a_missing_chunk_is_unreachable(root, capsys):
    objects = chain("p", 4)
    path_of(root, objects[1]).unlink()
    status, report = run(capsys, "fsck", root)
    lost = {path_of(root, planned).name for planned in objects[2:]}
    assert status == 1
    assert {name for name, what, _ in findings(report) if what == "unreachable"} == lost
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert len(object_files(root)) == 4


def test_a_snapshot_needs_the_chunks_of_its_own_model(root, capsys):
    shutil.copytree(root / NAMESPACE.attention, root / ("e" * 64))
    shutil.rmtree(root / NAMESPACE.attention)
    _, report = run(capsys, "fsck", root)
    assert (path_of(root, chain("p", 4)[4]).name, "unreachable", True) in findings(report)


def test_an_object_without_one_ranks_file_is_incomplete(tmp_path, capsys):
    root = tmp_path / "root"
    with tier_pair(root, world_size=2) as made:
        made.store(chain("p", 2))
        made.path(chain("p", 2)[2], 1).unlink()
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert (path_of(root, chain("p", 2)[2]).name, "incomplete", True) in findings(report)
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert len(object_files(root)) == 4


def test_while_somebody_serves_what_may_be_on_its_way_is_a_note(root, capsys):
    with tier_pair(root) as made:
        made.recovered()
        made.store(chain("new", 1))
        path_of(root, chain("p", 4)[1]).unlink()
        status, report = run(capsys, "fsck", root, "--repair")
        assert status == 0
        assert {what for _, what, is_problem in findings(report) if not is_problem} == {"unreachable", "ledger"}
        assert path_of(root, chain("p", 4)[2]).exists()


def test_modes_are_reported_and_put_right(root, capsys):
    paths = [path_of(root, chain("p", 4)[0]), root / NAMESPACE.attention, root]
    for path in paths:
        path.chmod(0o755)
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert [what for _, what, _ in findings(report)] == ["mode"] * 3
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o700, 0o700]


def test_leftovers_are_removed_when_their_writer_is_gone(root, capsys):
    directory = object_files(root)[0].parent
    living, dead, old = directory / temporary_name(), directory / ".tmp.99999999.1.2", root / ".tmp.00000000.1.2.3"
    for path in (living, dead, old):
        path.write_bytes(b"half")
    for path in (living, old):  # the one's writer lives, and nobody here can say whether the other's does
        os.utime(path, (time.time() - 7200,) * 2)
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert findings(report) == sorted(
        [(living.name, "leftover", False), (dead.name, "leftover", True), (old.name, "leftover", True)]
    )
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert [path.exists() for path in (living, dead, old)] == [True, False, False]


@pytest.mark.parametrize("content", [b"garbage", None])
def test_a_ledger_that_does_not_cover_the_files_is_counted_anew(root, capsys, content):
    if content is None:
        with Ledger(str(root), Device()).locked() as state:
            state.file_bytes, state.leases = 5, [0] * len(state.leases)
    else:
        (root / "ledger").write_bytes(content)
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (1, [("ledger", "ledger", True)])
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    with Ledger(str(root), Device()).locked() as state:
        assert state.file_bytes == bytes_under(root)


def test_a_missing_ledger_is_a_note_and_is_not_made(root, capsys):
    (root / "ledger").unlink()
    assert run(capsys, "fsck", root)[0] == 0
    assert not (root / "ledger").exists()


def test_strangers_are_named_without_harm_to_the_terminal_and_left_alone(root, capsys):
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "ab").mkdir()
    (elsewhere / "ab" / ".tmp.99999999.1.2").write_bytes(b"mine")
    (root / ("f" * 64)).symlink_to(elsewhere)
    (root / NAMESPACE.attention / "zz").symlink_to(elsewhere)
    os.mkfifo(root / NAMESPACE.attention / "pipe")
    (root / ("n" * 255)).write_text("long")
    (root / "\x1b[2Jbell\a\n").write_text("steering")
    (root / os.fsdecode(b"\xff\xfe")).write_text("not text")
    (path_of(root, chain("p", 4)[0]).parent / "notes.txt").write_text("mine")
    (root / "leases" / "fifo").mkdir()
    before = set(contents(root.parent))
    assert cli.main(["fsck", str(root), "--repair"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2Jbell\\x07\\n" in shown
    assert "\x1b" not in shown and "\a" not in shown
    status, report = run(capsys, "fsck", root, "--repair")
    assert status == 0
    assert [what for _, what, _ in findings(report)] == ["stranger"] * 8
    assert run(capsys, "gc", root, "--max-bytes", 0)[0] in (0, 1)
    assert set(contents(root.parent)) - before == set()
    assert (elsewhere / "ab" / ".tmp.99999999.1.2").exists()


@pytest.mark.parametrize("words", [b"{", b"[1]", b"[" * 100_000, b"\xff", b'{"x": "' + b"y" * (1 << 20) + b'"}'])
def test_a_hostile_namespace_json_is_a_note(root, capsys, words):
    (root / NAMESPACE.snapshot / "namespace.json").write_bytes(words)
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (0, [("namespace.json", "manifest", False)])
    assert run(capsys, "stats", root)[0] == 0


def test_what_cannot_be_read_is_reported(root, capsys, monkeypatch):
    bad = str(path_of(root, chain("p", 4)[4]))

    class Refusing(Device):
        def open(self, path, flags):
            if path == bad:
                raise PermissionError(13, "Permission denied", path)
            return super().open(path, flags)

    report = fsck.Check(str(root), device=Refusing()).run()
    assert [(found.what, found.is_problem) for found in report.findings] == [("unreadable", True)]
    assert "Permission denied" in report.findings[0].detail


def test_a_file_that_goes_while_it_is_checked_is_no_finding(root):
    path = path_of(root, chain("p", 4)[4])

    class Evicting(Device):
        def open(self, name, flags):
            path.unlink(missing_ok=True)
            return super().open(name, flags)

    report = fsck.Check(str(root), device=Evicting()).run()
    assert (report.problems, report.num_files) == ([], 7)


# gc


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

    read_header = gc.read_header
    ring = tuple(planned.object_id for planned in chain("p", 4))
    monkeypatch.setattr(gc, "read_header", everybody)
    assert gc.collect(str(root), 0).removed_files == 8


# Interrupted.


def test_ctrl_c_ends_it_with_130_and_what_is_left_is_sound(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root, capacity_bytes="1 GiB") as made:
        made.store(chain("p", 300))
    source = FORBID.replace(
        "from vllm_overlay.cli.main import main",
        "import time\nfrom vllm_overlay.cli.main import main\nfrom vllm_overlay.tiers.disk.ledger import Ledger\n"
        "remove = Ledger.remove_files\n"
        "def slowly(self, paths):\n    remove(self, paths)\n    print('.', flush=True)\n    time.sleep(600)\n"
        "Ledger.remove_files = slowly",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, "gc", str(root), "--max-bytes", "0"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == ".\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "\nvllm-overlay: interrupted\n")
    left = object_files(root)
    assert 0 < len(left) < 301
    assert fsck.Check(str(root)).run().findings == []
    again = TierPair(root, capacity_bytes="1 GiB").recovered()
    assert len(again.tier.index) == len(left)
    again.close()
