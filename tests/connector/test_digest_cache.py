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
from vllm_overlay.connector.digest_cache import MAX_BYTES, MAX_ENTRIES, FileIdentity, read_digests, write_digests

FILE = FileIdentity(path="ab" * 32, device=1, inode=2, size=3, mtime_ns=4, ctime_ns=5)
DIGEST, FORGED = "cd" * 32, "ef" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    return root / "weights.json"


@pytest.fixture
def cache(path: Path) -> Path:
    """One that was written."""
    write_digests(path, {FILE: DIGEST})
    return path


def test_what_was_written_is_found_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_digests(cache) == {FILE: DIGEST}
    assert cache.stat().st_mode & 0o777 == 0o600
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
        (link, "symbolic link"),
        (fifo, "damaged"),
        (directory, "directory"),
        (lambda path: path.write_bytes(b" " * MAX_BYTES + path.read_bytes()), "damaged"),
    ],
    ids=["0666", "0620", "link", "fifo", "directory", "large"],
)
def test_a_cache_that_others_may_have_written_is_not_believed(
    cache: Path, change: Callable[[Path], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(cache)
    assert read_digests(cache) == {}
    [record] = logged_by(digest_cache, caplog)
    line = record.getMessage()
    assert words in line and "0700" in line


def test_a_cache_of_another_user_is_not_believed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Faked, because only root can give files away."""
    fstat = os.fstat

    def as_of_another(fd: int) -> os.stat_result:
        values = list(fstat(fd))
        values[4] += 1
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", as_of_another)
    assert read_digests(cache) == {}
    assert f"user {os.geteuid() + 1}" in caplog.text


def test_a_cache_in_a_link_s_place_replaces_the_link(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    path.symlink_to(target)
    write_digests(path, {FILE: DIGEST})
    assert read_digests(path) == {FILE: DIGEST}
    assert target.read_text() == "precious"


@pytest.mark.parametrize("version", [0, 2, None])
def test_a_cache_of_another_version_is_a_miss(cache: Path, version: int | None) -> None:
    cache.write_text(json.dumps({**json.loads(cache.read_text()), "version": version}))
    assert read_digests(cache) == {}


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
def test_garbage_is_a_miss(cache: Path, raw: bytes) -> None:
    cache.write_bytes(raw)
    assert read_digests(cache) == {}


def test_every_truncated_cache_is_a_miss(cache: Path) -> None:
    raw = cache.read_bytes()
    for length in range(len(raw)):
        cache.write_bytes(raw[:length])
        assert read_digests(cache) == {}


@pytest.mark.parametrize("name", ["path", "digest"])
@pytest.mark.parametrize("value", ["ab" * 31, "ab" * 33, "AB" * 32, "ab" * 32 + "\n", "../" + "a" * 61, 1, None])
def test_a_field_out_of_its_bounds_is_a_miss(cache: Path, name: str, value: object) -> None:
    words = json.loads(cache.read_text())
    [entry] = words["entries"]
    (entry["file"] if name == "path" else entry)[name] = value
    cache.write_text(json.dumps(words))
    assert read_digests(cache) == {}


@given(data=st.data())
def test_no_changed_byte_raises(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("root") / "weights.json"
    write_digests(path, {FILE: DIGEST})
    raw = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    assert len(read_digests(path)) <= 1


def test_a_cache_with_too_many_entries_is_a_miss(cache: Path) -> None:
    words = json.loads(cache.read_text())
    words["entries"] *= MAX_ENTRIES + 1
    cache.write_text(json.dumps(words, separators=(",", ":")))
    assert cache.stat().st_size < MAX_BYTES
    assert read_digests(cache) == {}


def test_the_oldest_entries_go_first(path: Path) -> None:
    files = [FileIdentity("ab" * 32, 2**64 - 1, inode, 2**63, 2**63, 2**63) for inode in range(MAX_ENTRIES + 1)]
    write_digests(path, dict.fromkeys(files, DIGEST))
    assert list(read_digests(path)) == files[1:]


def test_a_cache_that_cannot_be_written_ends_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "none" / "weights.json"
    write_digests(path, {FILE: DIGEST})
    assert read_digests(path) == {}
    assert [record.levelno for record in logged_by(digest_cache, caplog)] == [logging.WARNING]
