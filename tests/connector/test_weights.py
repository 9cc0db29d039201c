# SPDX-License-Identifier: Apache-2.0
"""Weights that changed have another digest, and weights that did not are read once."""

import logging
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_overlay.config import ConfigError
from vllm_overlay.connector import weights
from vllm_overlay.connector.weights import safetensors_files, weights_digest

OLD, NEW = b"old weights " * 1000, b"new weights " * 1000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(OLD)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    return root / "weights.json"


@pytest.fixture
def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written are old."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read, in order."""
    names: list[str] = []
    read = weights.read_digest

    def counting(file: FileIO, num_bytes: int) -> str:
        names.append(Path(file.name).name)
        return read(file, num_bytes)

    monkeypatch.setattr(weights, "read_digest", counting)
    return names


def digest_of(root: Path, *files: Path) -> str:
    """What a root without a cache says."""
    root.mkdir(mode=0o700)
    return weights_digest(files, root / "weights.json")


def with_old_mtime(file: Path, change: Callable[[], object]) -> None:
    """Makes the change and sets mtime back, until ctime has moved: two changes may fall into one tick of the clock."""
    before = file.stat()
    while True:
        change()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        if after.st_ctime_ns != before.st_ctime_ns:
            return


@pytest.mark.usefixtures("an_hour_later")
def test_weights_changed_in_place_with_their_mtime_set_back_have_another_digest(file: Path, cache: Path) -> None:
    old = weights_digest([file], cache)
    inode = file.stat().st_ino
    with_old_mtime(file, lambda: file.write_bytes(NEW))
    assert file.stat().st_ino == inode
    assert weights_digest([file], cache) != old


@pytest.mark.usefixtures("an_hour_later")
def test_weights_in_a_new_file_with_the_inode_of_the_old_one_have_another_digest(file: Path, cache: Path) -> None:
    """ext4 gives the number of a removed file to the next one. Elsewhere only the change in place is tested."""
    old, inode = weights_digest([file], cache), file.stat().st_ino

    def replace() -> None:
        file.unlink()
        file.write_bytes(NEW)

    with_old_mtime(file, replace)
    if file.stat().st_ino != inode:
        pytest.skip("this file system gives a new file another inode number")
    assert weights_digest([file], cache) != old


@pytest.mark.usefixtures("an_hour_later")
@pytest.mark.parametrize("field", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_a_file_with_another_device_inode_size_or_time_is_read_again(
    file: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Faked: no test can change one of these alone."""
    weights_digest([file], cache)
    fstat = os.fstat

    def changed(fd: int) -> SimpleNamespace:
        found = fstat(fd)
        names = [name for name in dir(found) if name.startswith("st_")]
        return SimpleNamespace(**{name: getattr(found, name) + (name == field) for name in names})

    monkeypatch.setattr(os, "fstat", changed)
    weights_digest([file], cache)
    assert len(reads) == 2


@pytest.mark.usefixtures("an_hour_later")
def test_weights_are_read_once_until_their_file_changes(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in files:
        path.write_bytes(path.name.encode())
    first = weights_digest(files, cache)
    assert weights_digest(files, cache) == first
    assert reads == ["a.safetensors", "b.safetensors"]

    os.utime(files[0], ns=(1, 1))
    assert weights_digest(files, cache) == first
    assert weights_digest(files, cache) == first
    assert reads[2:] == ["a.safetensors"]


@pytest.mark.usefixtures("an_hour_later")
def test_the_digests_of_another_model_are_kept(file: Path, cache: Path, tmp_path: Path, reads: list[str]) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(NEW)
    for path in (file, other, file, other):
        weights_digest([path], cache)
    assert reads == [file.name, other.name]


@pytest.mark.parametrize("mtime_s", [None, 1], ids=["as it is", "set back"])
def test_weights_written_just_now_are_read_again(
    file: Path, cache: Path, reads: list[str], mtime_s: int | None
) -> None:
    """A change in the same tick of the file system's clock would leave every time as it is."""
    if mtime_s is not None:
        os.utime(file, (mtime_s, mtime_s))
    first = weights_digest([file], cache)
    assert weights_digest([file], cache) == first
    assert len(reads) == 2


@pytest.mark.usefixtures("an_hour_later")
def test_weights_with_an_mtime_in_the_future_are_read_again(file: Path, cache: Path, reads: list[str]) -> None:
    os.utime(file, ns=(0, time.time_ns() + 10**15))
    for _ in range(2):
        weights_digest([file], cache)
    assert len(reads) == 2


@pytest.mark.usefixtures("an_hour_later")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_weights_that_change_while_they_are_read_are_read_again(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    changes = [NEW]
    read = weights.read_digest

    def reading(opened: FileIO, num_bytes: int) -> str:
        found = read(opened, num_bytes)
        if changes:
            other = tmp_path / "other"
            other.write_bytes(changes.pop())
            other.replace(file) if is_replaced else with_old_mtime(file, lambda: file.write_bytes(NEW))
        return found

    monkeypatch.setattr(weights, "read_digest", reading)
    assert weights_digest([file], cache) == digest_of(tmp_path / "new", file) == weights_digest([file], cache)


def test_weights_that_never_stay_are_refused(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = weights.read_digest

    def reading(opened: FileIO, num_bytes: int) -> str:
        with file.open("ab") as growing:
            growing.write(b"more")
        return read(opened, num_bytes)

    monkeypatch.setattr(weights, "read_digest", reading)
    with pytest.raises(ConfigError, match=r"model.safetensors' changed .* start again"):
        weights_digest([file], cache)
    assert not cache.exists()


def test_a_file_is_read_no_further_than_its_size(file: Path) -> None:
    """One that grows as fast as it is read would be read without an end."""
    with file.open("rb", buffering=0) as opened:
        weights.read_digest(opened, 1)
        assert opened.tell() < len(OLD)


@pytest.mark.usefixtures("an_hour_later")
def test_a_link_in_the_place_of_the_lock_ends_no_start(file: Path, cache: Path, tmp_path: Path) -> None:
    cache.with_suffix(".lock").symlink_to(tmp_path / "elsewhere")
    assert weights_digest([file], cache) == digest_of(tmp_path / "other", file)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("an_hour_later")
def test_a_name_that_is_no_utf8_ends_no_start(
    tmp_path: Path, cache: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, weights.__name__)
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.safetensors"))
    path.write_bytes(OLD)
    assert weights_digest([path], cache) == weights_digest([path], cache)
    assert len(reads) == 1
    assert "safetensors" in caplog.text.encode().decode()  # a log in UTF-8 has it


def test_how_a_models_directory_is_laid_out_changes_nothing(tmp_path: Path) -> None:
    """The same files as a plain directory, its copy elsewhere, links to it, and links to blobs as in the Hub's cache.

    Blobs have names that say nothing, and another order.
    """
    shards = {"model-00001-of-00002.safetensors": OLD, "model-00002-of-00002.safetensors": NEW}
    layouts = {name: tmp_path / name for name in ("plain", "copy", "links", "hub/snapshots/0a1b", "relative")}
    blobs = tmp_path / "hub" / "blobs"
    for directory in (*layouts.values(), blobs):
        directory.mkdir(parents=True)
    for number, (name, content) in enumerate(shards.items()):
        for layout in ("plain", "copy"):
            (layouts[layout] / name).write_bytes(content)
        (blobs / f"{9 - number}f3c").write_bytes(content)
        (layouts["links"] / name).symlink_to(layouts["plain"] / name)
        (layouts["hub/snapshots/0a1b"] / name).symlink_to(f"../../blobs/{9 - number}f3c")
        (layouts["relative"] / name).hardlink_to(layouts["plain"] / name)
    (tmp_path / "linked").symlink_to(layouts["plain"])
    found = {
        directory: digest_of(tmp_path / f"root-{number}", *safetensors_files(str(directory), None))
        for number, directory in enumerate([*layouts.values(), tmp_path / "linked"])
    }
    assert len(set(found.values())) == 1, found


def test_weights_under_each_others_names_have_another_digest(tmp_path: Path) -> None:
    """Where two files have one tensor, the names decide which is loaded last."""
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    digests = []
    for number, contents in enumerate([(OLD, NEW), (NEW, OLD)]):
        for path, content in zip((one, two), contents, strict=True):
            path.write_bytes(content)
        digests.append(digest_of(tmp_path / f"root-{number}", one, two))
    assert digests[0] != digests[1]
