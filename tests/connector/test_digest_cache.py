# SPDX-License-Identifier: Apache-2.0
"""The cache of the weights' digests is believed only if nobody else can have written it."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.logged import logged_by
from vllm_overlay.connector import digest_cache
from vllm_overlay.connector.digest_cache import MAX_BYTES, MAX_ENTRIES, DigestCache, FileIdentity

FILE = FileIdentity(path="ab" * 32, device=1, inode=2, size=3, mtime_ns=4, ctime_ns=5)
DIGEST, FORGED = "cd" * 32, "ef" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    return root / "weights.json"


def written(path: Path) -> DigestCache:
    cache = DigestCache(path)
    cache.write({FILE: DIGEST})
    return cache


def test_what_was_written_is_found_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert written(path).read() == {FILE: DIGEST}
    assert path.stat().st_mode & 0o777 == 0o600
    assert logged_by(digest_cache, caplog) == []


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.chmod(0o666), "mode 0666"),
        (lambda path: path.chmod(0o620), "mode 0620"),
        (lambda path: path.parent.chmod(0o770), "mode 0770"),
        (lambda path: path.parent.chmod(0o707), "mode 0707"),
        (link, "link"),
        (fifo, "no regular file"),
        (directory, "no regular file"),
        (lambda path: path.write_bytes(b" " * (MAX_BYTES + 1)), f"more than {MAX_BYTES} bytes"),
    ],
    ids=["0666", "0620", "group", "others", "link", "fifo", "directory", "large"],
)
def test_a_cache_that_others_may_have_written_is_not_believed(
    path: Path, change: Callable[[Path], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = written(path)
    change(path)
    assert cache.read() == {}
    [record] = logged_by(digest_cache, caplog)
    line = record.getMessage()
    assert words in line and "0700" in line


@pytest.mark.parametrize("whose", ["file", "directory"])
def test_a_cache_of_another_user_is_not_believed(
    path: Path, whose: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Faked, because only root can give files away."""
    cache, fstat = written(path), os.fstat
    other = os.stat(path if whose == "file" else path.parent).st_ino

    def as_of_another(fd: int) -> os.stat_result:
        found = fstat(fd)
        values = list(found)
        values[4] += found.st_ino == other
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", as_of_another)
    assert cache.read() == {}
    assert f"user {os.geteuid() + 1}" in caplog.text


def test_nothing_is_kept_where_others_can_write(path: Path) -> None:
    path.parent.chmod(0o770)
    written(path)
    assert not path.exists()


def test_a_cache_in_a_link_s_place_replaces_the_link(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    path.symlink_to(target)
    assert written(path).read() == {FILE: DIGEST}
    assert target.read_text() == "precious"


@pytest.mark.parametrize("version", [0, 2, None])
def test_a_cache_of_another_version_is_a_miss(path: Path, version: int | None) -> None:
    cache = written(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    assert cache.read() == {}


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"null", b"\xff", b'{"\xff":2}', b"[" * 100_000,
        b'{"version":' + b"9" * 10_000 + b"}", b'{"version":1e999}',
        b'{"version":1}', b'{"version":1,"entries":{}}', b'{"version":1,"entries":[{}]}',
        b'{"version":1,"entries":[],"more":' + b"[" * 100_000, b'{"version":1,"entries":' + b"[" * 100_000,
        b'{"version":1,"entries":[{"file":' + b'{"file":' * 100_000, b'{"version":1,"entries":[{"digest":"\xff',
    ],
    ids=range(15),
)  # fmt: skip
def test_garbage_is_a_miss(path: Path, raw: bytes) -> None:
    cache = written(path)
    path.write_bytes(raw)
    assert cache.read() == {}


def test_every_truncated_cache_is_a_miss(path: Path) -> None:
    cache = written(path)
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        assert cache.read() == {}


@pytest.mark.parametrize("name", ["path", "digest"])
@pytest.mark.parametrize("value", ["ab" * 31, "ab" * 33, "AB" * 32, "ab" * 32 + "\n", "../" + "a" * 61, 1, None])
def test_a_field_out_of_its_bounds_is_a_miss(path: Path, name: str, value: object) -> None:
    cache = written(path)
    words = json.loads(path.read_text())
    [entry] = words["entries"]
    (entry["file"] if name == "path" else entry)[name] = value
    path.write_text(json.dumps(words))
    assert cache.read() == {}


@given(data=st.data())
def test_no_changed_byte_raises(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("root") / "weights.json"
    cache = written(path)
    raw = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    assert len(cache.read()) <= 1


def test_a_cache_with_too_many_entries_is_a_miss(path: Path) -> None:
    cache = written(path)
    words = json.loads(path.read_text())
    words["entries"] *= MAX_ENTRIES + 1
    path.write_text(json.dumps(words, separators=(",", ":")))
    assert path.stat().st_size < MAX_BYTES
    assert cache.read() == {}


def test_the_oldest_entries_go_first(path: Path) -> None:
    cache = DigestCache(path)
    files = [FileIdentity("ab" * 32, 2**64 - 1, inode, 2**63, 2**63, 2**63) for inode in range(MAX_ENTRIES + 1)]
    cache.write(dict.fromkeys(files, DIGEST))
    assert list(cache.read()) == files[1:]


def test_a_cache_that_cannot_be_written_ends_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = written(tmp_path / "none" / "weights.json")
    assert cache.read() == {}
    assert [record.levelno for record in logged_by(digest_cache, caplog)] == [logging.WARNING]
