# SPDX-License-Identifier: Apache-2.0
"""What all commands share: exit statuses, help, what they may import, and Ctrl-C."""

import re
import signal
import subprocess
import sys

import pytest

from tests.cli.commands import WITHOUT_VLLM
from tests.python_path import REPOSITORY, run_python
from tests.waiting import PATIENCE_S
from vllm_overlay import cli
from vllm_overlay.cli import command_line
from vllm_overlay.cli.command import SOUND, Command


@pytest.mark.parametrize("command", [["stats"], ["stats", "--verify", "--remove"]])
def test_it_needs_neither_torch_nor_vllm(root, command):
    done = run_python("-c", WITHOUT_VLLM, *command, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("command", [[], ["stats"], ["fly", "ROOT"]])
def test_wrong_usage_has_status_2(command):
    with pytest.raises(SystemExit) as left:
        cli.main(command)
    assert left.value.code == 2


def test_help_says_what_each_exit_status_means(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for status in ("0    verify: all restored", "1    verify: an answer", "2    wrong usage", "130  interrupted"):
        assert f"\n  {status}" in shown


def test_python_m_is_the_same_command(root):
    done = run_python("-m", "vllm_overlay", "stats", root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 chunks of full attention group 0" in done.stdout


def test_a_command_brings_its_own_help_examples_and_statuses(capsys, monkeypatch):
    count = Command(
        name="count",
        summary="count to a number",
        description="Counts.",
        examples={"count 3": "one, two, three"},
        statuses={SOUND: "counted"},
        add_arguments=lambda parser: parser.add_argument("number", type=int),
        run=lambda arguments: print(*range(1, arguments.number + 1)) or SOUND,
    )
    monkeypatch.setattr(command_line, "COMMANDS", (*command_line.COMMANDS, count))
    assert cli.main(["count", "3"]) == 0
    assert capsys.readouterr().out == "1 2 3\n"
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    help_text = capsys.readouterr().out
    assert re.search(r"^    count +count to a number$", help_text, re.MULTILINE)
    assert re.search(r"^  vllm-overlay count 3 +one, two, three$", help_text, re.MULTILINE)
    assert re.search(r"^  0    verify: .*; stats: .*; count: counted$", help_text, re.MULTILINE)


def test_ctrl_c_ends_it_with_130(root):
    source = WITHOUT_VLLM.replace(
        "from vllm_overlay.cli import main",
        "import time\nfrom vllm_overlay.cli import main\nfrom vllm_overlay.tiers.disk.files.device import Device\n"
        "def slowly(self, path, flags):\n    print('.', flush=True)\n    time.sleep(600)\n"
        "Device.open = slowly",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, "stats", str(root), "--verify"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == ".\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, "\nvllm-overlay: interrupted\n")
