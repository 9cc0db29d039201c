# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import os

import pytest

from tests.multi_connector.fakes import ENDINGS, Boom
from tests.multi_connector.lockstep import admit, answering
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector import control_file
from vllm_overlay.multi_connector.control_file import ControlFile, read_switches
from vllm_overlay.multi_connector.settings import ChildSettings

CONFIGURED = {"cpu": ChildSettings(min_tokens=64), "disk": ChildSettings(load_weight=0.5)}


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(control_file.logger, "warning", lambda message, *args: found.append(message % args))
    return found


def write(path, content):
    """As an operator should: whole, under another name, then renamed."""
    beside = path.with_suffix(".new")
    beside.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(beside, path)


def test_what_is_named_changes_and_the_rest_is_as_configured():
    found = read_switches(b'{"disk": {"store": false, "min_tokens": 5}}', CONFIGURED)
    assert found["cpu"] == CONFIGURED["cpu"]
    assert found["disk"] == ChildSettings(load_weight=0.5, store=False, min_tokens=5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is no JSON: Input data was truncated"),
        (b"{", "it is no JSON: Input data was truncated"),
        (b"[]", 'it must be an object that has an object for each child, such as {"cpu": {"store": false}}'),
        (b'{"cpu": 5}', "an object for each child"),
        (b'{"gpu": {}}', "there is no child 'gpu': its children are cpu, disk"),
        (b'{"dsk": {}}', "; did you mean disk?"),
        (b'{"cpu": {"min_token": 5}}', "; did you mean min_tokens?"),
        (b'{"cpu": {"promote": true}}', "'promote' of 'cpu' cannot be changed: min_tokens, store, load can"),
        (b'{"cpu": {"min_tokens": -1}}', "min_tokens=-1 of 'cpu' must be a whole number of at least 0, such as 0"),
        (b'{"cpu": {"store": 1}}', "store=1 of 'cpu' must be true or false, such as true"),
        (b'{"cpu": {"min_tokens": true}}', "min_tokens=True of 'cpu' must be a whole number"),
        (b'{"cpu": {"min_tokens": 1.5}}', "min_tokens=1.5 of 'cpu' must be a whole number"),
        (b'{"cpu": {"store": "\xff"}}', ""),
    ],
)
def test_content_that_cannot_be_meant_is_refused_with_a_sentence(content, words):
    with pytest.raises(ConfigError) as caught:
        read_switches(content, CONFIGURED)
    assert words in str(caught.value)


def test_it_is_read_when_it_changes_at_most_once_a_second(tmp_path):
    path = tmp_path / "switches.json"
    switches = ControlFile(str(path), CONFIGURED)
    switches.look(0.0)
    assert switches.settings == CONFIGURED
    write(path, {"cpu": {"load": False}})
    switches.look(0.5)
    assert switches.settings["cpu"].load
    switches.look(1.0)
    assert not switches.settings["cpu"].load
    write(path, {})
    switches.look(2.5)
    assert switches.settings == CONFIGURED
    write(path, {"cpu": {"load": False}})
    switches.look(3.5)
    path.unlink()
    switches.look(4.5)
    assert switches.settings == CONFIGURED


def test_bad_content_is_one_warning_and_keeps_the_last_good(tmp_path, warnings):
    path = tmp_path / "switches.json"
    switches = ControlFile(str(path), CONFIGURED)
    write(path, {"cpu": {"load": False}})
    switches.look(0.0)
    write(path, "{")
    for now in (1.0, 2.0, 3.0):
        switches.look(now)
    assert not switches.settings["cpu"].load
    (line,) = warnings
    assert "the last good switches hold" in line


def test_a_place_where_it_cannot_be_looked_for_is_one_warning(tmp_path, warnings):
    """As below a directory that only its owner may enter."""
    path = tmp_path / "file" / "switches.json"
    path.parent.write_text("")
    switches = ControlFile(str(path), CONFIGURED)
    for now in (0.0, 1.0, 2.0):
        switches.look(now)
    (line,) = warnings
    assert "Not a directory" in line
    path.parent.unlink()
    path.parent.mkdir()
    write(path, {"cpu": {"load": False}})
    switches.look(3.0)
    assert not switches.settings["cpu"].load


def test_a_file_that_could_not_be_read_is_read_once_its_mode_allows_it(tmp_path, warnings, monkeypatch):
    """Faked, because nobody keeps root from reading."""
    path = tmp_path / "switches.json"
    read = type(path).read_bytes

    def read_if_allowed(self):
        if not self.stat().st_mode & 0o400:
            raise PermissionError(13, "Permission denied")
        return read(self)

    monkeypatch.setattr(type(path), "read_bytes", read_if_allowed)
    write(path, {"cpu": {"load": False}})
    path.chmod(0)
    switches = ControlFile(str(path), CONFIGURED)
    for now in (0.0, 1.0):
        switches.look(now)
    assert switches.settings == CONFIGURED and len(warnings) == 1
    path.chmod(0o600)
    switches.look(2.0)
    assert not switches.settings["cpu"].load


@pytest.mark.parametrize("error", [MemoryError, Boom, *ENDINGS])
def test_whatever_reading_raises_is_a_warning_unless_the_process_ends(error, tmp_path, warnings, monkeypatch):
    path = tmp_path / "switches.json"
    write(path, {"cpu": {"load": False}})

    def read(content, configured):
        raise error("reading")

    monkeypatch.setattr(control_file, "read_switches", read)
    switches = ControlFile(str(path), CONFIGURED)
    with pytest.raises(error) if error in ENDINGS else contextlib.nullcontext():
        switches.look(0.0)
    assert switches.settings == CONFIGURED and len(warnings) == (error not in ENDINGS)


def test_an_operator_stops_loads_from_a_child_and_allows_them_again(tmp_path):
    path = tmp_path / "switches.json"
    connector = answering(100, 16, control_file=str(path))
    chosen = []
    for content in ({}, {"a": {"load": False}}, {"a": {"load": True}, "b": {"min_tokens": 17}}, {"a": {"load": False}}):
        write(path, content)
        connector._scheduler._clock.now += 1
        chosen.append(admit(connector, f"r{len(chosen)}"))
    assert chosen == [100, 16, 100, 16]
