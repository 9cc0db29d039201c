# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay verify``: what is wrong before a server is asked; tests/http/test_verify.py asks real ones."""

from pathlib import Path

import pytest

from tests.cli.commands import refused
from vllm_overlay import cli

NOBODY = "http://127.0.0.1:1"


def test_no_server_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{NOBODY}/v1/models was not answered: " in refused(capsys, "verify", NOBODY)
    assert "is no URL of a server: give one such as http://127.0.0.1:8000" in refused(capsys, "verify", "ftp://there")


def test_a_place_that_cannot_be_written_is_said_before_a_server_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent" / "answers.json"
    assert f"--save {absent} cannot be written: give a name in a directory" in refused(
        capsys, "verify", NOBODY, "--save", absent
    )
    for place in (tmp_path, Path("/dev/null")):
        assert f"--save {place} is there and is no file" in refused(capsys, "verify", NOBODY, "--save", place)
    assert "was not answered" in refused(capsys, "verify", NOBODY, "--save", tmp_path / "answers.json")
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_saved_is_refused_before_a_server_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answers.json"
    assert "No such file" in refused(capsys, "verify", NOBODY, "--against", file)
    file.write_text("[]")
    assert f"{file} was not written by verify --save, or not whole" in refused(
        capsys, "verify", NOBODY, "--against", file
    )
    for option in ("--longest", "--seed"):
        assert "leave them out with --against" in refused(capsys, "verify", NOBODY, "--against", file, option, "0")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--save", "a", "--against", "b"], "not allowed with argument --save"),
        (["--tolerance", "-1"], "'-1' is not a difference of logprobs: give a number from 0, such as 0.05"),
        (["--tolerance", "5%"], "'5%' is not a difference of logprobs"),
    ],
)
def test_wrong_usage(wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["verify", NOBODY, *wrong])
    assert left.value.code == 2
    assert words in capsys.readouterr().err
