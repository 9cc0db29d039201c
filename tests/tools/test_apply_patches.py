# SPDX-License-Identifier: Apache-2.0
"""The command line of the series, as users call it."""

import os
import subprocess

import pytest

from tests.patches.trees import contents, installed_originals, make_unpatched
from tests.python_path import REPOSITORY
from tests.python_path import run_python as run
from vllm_overlay.patching.cli import main
from vllm_overlay.patching.series import load

TOOL = REPOSITORY / "tools" / "apply_patches.py"


@pytest.fixture
def checkout(tmp_path):
    return make_unpatched(tmp_path / "checkout")


def test_a_checkout_is_checked_patched_and_put_back(checkout, tmp_path):
    before = contents(checkout)
    checked = run(TOOL, "--target", checkout, "--check", cwd=tmp_path)
    assert checked.returncode == 0 and "The series would apply." in checked.stdout, checked
    assert run(TOOL, "--target", checkout, "--status").returncode == 1
    assert contents(checkout) == before
    applied = run(TOOL, "--target", checkout)
    assert applied.returncode == 0 and "done" in applied.stdout, applied
    assert run(TOOL, "--target", checkout / "vllm", "--status").returncode == 0
    again = run(TOOL, "--target", checkout)
    assert again.returncode == 0 and "has them already" in again.stdout
    assert "The series is applied: " in run(TOOL, "--target", checkout, "--check").stdout
    assert run(TOOL, "--target", checkout, "--reverse").returncode == 0
    assert contents(checkout) == before


def test_the_module_does_the_same_without_tools(checkout):
    done = run("-m", "vllm_overlay.patching", "--target", checkout, "--check")
    assert done.returncode == 0 and "The series would apply." in done.stdout, done


@pytest.mark.parametrize("last", [[], ["--reverse"]])
@pytest.mark.parametrize("at", [0, -1])
def test_a_series_that_is_in_only_in_part_is_told_with_the_command_that_repairs_it(checkout, capsys, at, last):
    series = load()
    main(["--target", str(checkout)])
    path = [*series.files][at]
    (checkout / path).write_bytes(installed_originals()[path])
    assert main(["--target", str(checkout), "--status"]) == 1
    command = f"`python {TOOL} --target {checkout}`"
    assert f"The series is applied only in part: run {command} to" in capsys.readouterr().out
    assert main(["--target", str(checkout), *last]) == 0
    assert "was applied only in part, this run repairs it" in capsys.readouterr().out
    main(["--target", str(checkout), "--status"])
    assert "in part" not in capsys.readouterr().out


def test_installed_is_the_vllm_that_this_python_would_import(checkout):
    done = run(TOOL, "--installed", "--status", env={**os.environ, "PYTHONPATH": str(checkout)})
    assert done.stdout.startswith(f"{checkout / 'vllm'}: vLLM 0.32.0"), done


@pytest.mark.parametrize("arguments", [[], ["--installed", "--target", "x"], ["--installed", "--check", "--reverse"]])
def test_wrong_usage_is_status_2(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_an_older_python_is_told_which_one_it_needs(checkout):
    """One of a distribution may be at hand for a checkout."""
    older = f"import sys, runpy; sys.version_info = (3, 10, 12); runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    done = run("-c", older)
    assert done.returncode == 1 and done.stderr.startswith("apply_patches.py needs Python 3.11, and this is "), done


def test_help_teaches_by_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "--installed --reverse" in said
    statuses = said.partition("exit status:\n")[2].splitlines()[:4]
    assert [line.split()[0] for line in statuses] == ["0", "1", "2", "130"]


def test_a_reader_that_goes_away_is_no_refusal(checkout):
    """As with `| head -1`."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    output = {"capture_output": False, "stdout": writer, "stderr": subprocess.PIPE}
    done = run(TOOL, "--target", checkout, "--status", env=environment, **output)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_the_system_refuses_is_a_sentence(checkout, capsys, monkeypatch):
    def refuse(*names):
        raise PermissionError(13, "Permission denied", "/somewhere/vllm")

    monkeypatch.setattr("vllm_overlay.patching.tree.find_root", refuse)
    assert main(["--target", str(checkout), "--check"]) == 1
    assert capsys.readouterr().err == "refused: /somewhere/vllm: Permission denied\n"
