# SPDX-License-Identifier: Apache-2.0
"""The file of a verification: what is read is what was written, and nothing else is taken for it."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from vllm_overlay.server.api_client import Completion
from vllm_overlay.verification import answers as module
from vllm_overlay.verification.answers import Answers, Computed, NothingToVerify
from vllm_overlay.verification.prompts import Prompt

LOGPROBS = [-2.769653081893921, -1e-45, -0.1, -5.960464477539063e-08, 0.0, -9999.0, -1 / 3, -2.5]


def computed() -> Computed:
    candidates = [{token: logprob, 99: -7.0} for token, logprob in enumerate(LOGPROBS)]
    answer = Completion(list(range(8)), LOGPROBS, 69, 0, 0.25, candidates)
    prompt = Prompt("69 tokens", tuple(range(69)), 64)
    return Computed(salt="0" * 32, server_started=1.5, answers=[Answers(prompt, answer, answer, None)])


def test_what_is_read_is_what_was_written_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text("an older one")
    computed().write(path)
    assert Computed.read(path) == computed()
    assert [entry.name for entry in tmp_path.iterdir()] == ["answers.json"]


def test_what_cannot_be_written_whole_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.json"
    path.write_text("an older one")
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        computed().write(path)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["an older one"]


def changed(**places: Any) -> bytes:
    """The file with other values; ``a__b__0`` is the way to one."""
    plain = _plain()
    for way, value in places.items():
        *parents, last = (int(word) if word.isdigit() else word for word in way.split("__"))
        place: Any = plain
        for parent in parents:
            place = place[parent]
        place[last] = value
    return json.dumps(plain).encode()


def _plain() -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(msgspec.json.encode(computed()))
    return plain


def test_a_file_with_nothing_changed_is_read() -> None:
    assert changed() == json.dumps(_plain()).encode()


WRONG = {
    "empty": b"",
    "cut at once": b"{",
    "deep": b"[" * 100_000,
    "null": b"null",
    "a pickle": b"\x80\x04}q\x00.",
    "cut at the end": changed()[:-20],
    "a later format": changed(format="vllm-overlay verification 2"),
    "a salt of another kind": changed(salt="../../x"),
    "no answers": changed(answers=[]),
    "an unknown field": changed(unknown=1),
    "a logprob that is none": changed(answers__0__computed__logprobs__0=None),
    "too few logprobs": changed(answers__0__computed__logprobs=[-1.0]),
    "no candidates": changed(answers__0__computed__candidates=[]),
    "too few tokens": changed(answers__0__prompt__tokens=[1, 2]),
    "words for tokens": changed(answers__0__prompt__tokens=["a"] * 69),
    "no restore point": changed(answers__0__prompt__boundary=0),
    "a restore point at the end": changed(answers__0__prompt__boundary=69),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_anything_else_is_refused_with_a_sentence(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "answers.json"
    path.write_bytes(WRONG[wrong])
    with pytest.raises(NothingToVerify, match=r"answers\.json was not written by verify --save, or not whole: "):
        Computed.read(path)


def test_no_more_is_read_than_a_file_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.json"
    computed().write(path)
    monkeypatch.setattr(module, "LARGEST_FILE_BYTES", path.stat().st_size)
    assert Computed.read(path) == computed()
    monkeypatch.setattr(module, "LARGEST_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(NothingToVerify, match="more than"):
        Computed.read(path)
