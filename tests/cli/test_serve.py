# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay serve``: what it says before it starts, what it refuses, and the process that it becomes.

vLLM is asked in the last test alone; tests/test_readme.py starts a server so.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from tests.cli import commands
from tests.planning.layouts import QWEN_35B_EXACT
from tests.waiting import PATIENCE_S, until
from vllm_overlay import cli
from vllm_overlay.patching.installed import UnpatchedError
from vllm_overlay.planning.question import Flags, Reply

MODEL = "/models/Qwen3.5-35B-A3B"


class Became(Exception):
    """In place of a process that is another one now."""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """64 GiB of free memory, 2 TiB of disk, and a process that cannot become another. Call it to change the flags."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda: 64 << 30)
    monkeypatch.setattr("vllm_overlay.planning.plan.volume_bytes", lambda root: (2 << 40, 2 << 40))

    def become(program, command):
        raise Became(program, *command)

    monkeypatch.setattr("vllm_overlay.cli.serve.os.execv", become)

    def answer(node_bytes=0, **flags):
        reply = Reply(Flags(model=MODEL, **flags), replace(QWEN_35B_EXACT, node_bytes=node_bytes))
        monkeypatch.setattr("vllm_overlay.planning.plan.ask_vllm", lambda question: reply)

    answer()
    return answer


def command_of(*arguments) -> list[str]:
    """Of the server that it becomes."""
    with pytest.raises(Became) as became:
        cli.main(["serve", *map(str, arguments)])
    program, *command = became.value.args
    assert program == command[0] == sys.executable
    return command


def refused(capsys, *arguments) -> str:
    return commands.refused(capsys, "serve", *arguments).splitlines()[-1]


def test_it_says_what_to_mind_then_the_command_and_becomes_it(tmp_path, capsys):
    root = tmp_path / "kv"
    command = command_of(MODEL, "--cpu", "32GiB", "--disk", f"{root}:4TiB", "--port", "8001")
    assert command[1:7] == ["-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--port", "8001"]
    assert command[7:12] == ["--enable-prefix-caching", "--prefix-match-unit", "64", "--shutdown-timeout", "10"]
    said = capsys.readouterr()
    assert said.out == ""
    *lines, last = said.err.splitlines()
    assert shlex.split(last) == command
    assert [line for line in lines if "Set capacity_bytes to at most 2047GiB" in line]
    assert [line for line in lines if line.startswith("vllm-overlay: cpu: 32.0 GiB, room for ")]
    assert root.is_dir()


def test_a_dry_run_starts_nothing_and_its_output_is_the_json(tmp_path, capsys):
    assert cli.main(["serve", MODEL, "--cpu", "900GiB", "--disk", f"{tmp_path / 'kv'}:1TiB", "--dry-run"]) == 0
    said = capsys.readouterr()
    command = shlex.split(said.err.splitlines()[-1])
    assert json.loads(said.out) == json.loads(command[command.index("--kv-transfer-config") + 1])
    assert "warning: --cpu: the tiers' 900GiB is more than the 64GiB of memory" in said.err
    assert not (tmp_path / "kv").exists()


def test_more_memory_than_a_container_has_is_refused_with_what_works(capsys):
    assert "900GiB is more than the 64GiB" in (said := refused(capsys, MODEL, "--cpu", "900GiB"))
    assert "32GiB leaves as much for the model" in said


def test_two_engines_have_a_tier_each(machine, capsys):
    machine(num_engines=2)
    assert "40GiB for each of 2 engines is more than the 64GiB" in refused(capsys, MODEL, "--cpu", "40GiB")


def test_on_a_cpu_vllm_leaves_the_tiers_their_memory(machine, capsys):
    """vLLM's default is 0.92 of all memory, and the tiers are refused after the weights were loaded."""
    machine(node_bytes=64 << 30)
    command = command_of(MODEL, "--cpu", "16GiB")
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.68"
    assert "note: --gpu-memory-utilization: it was not given" in capsys.readouterr().err


def test_on_a_cpu_a_cache_that_leaves_the_tiers_too_little_is_refused_before_weights(machine, capsys):
    machine(node_bytes=64 << 30, kv_cache_memory_bytes=60 << 30)
    said = refused(capsys, MODEL, "--cpu", "16GiB")
    assert "--kv-cache-memory-bytes: vLLM on a CPU takes 60GiB" in said and "--gpu-memory-utilization 0.68" in said


@pytest.mark.parametrize("what", ["a file", "somebody's directory", "a directory below a file"])
def test_a_path_that_can_be_no_root_is_refused_before_weights(tmp_path, capsys, what):
    taken = tmp_path / "taken"
    if what == "somebody's directory":
        taken.mkdir()
        (taken / "letter.txt").write_text("dear")
    else:
        taken.write_text("dear")
    said = refused(capsys, MODEL, "--disk", f"{taken / 'kv' if 'below' in what else taken}:1GiB")
    assert said.startswith("vllm-overlay: --disk: ") and str(taken) in said


def test_a_vllm_without_the_series_is_named_before_anything(monkeypatch, capsys):
    def require():
        raise UnpatchedError("run `python tools/apply_patches.py --installed`")

    monkeypatch.setattr("vllm_overlay.cli.serve.installed.require", require)
    assert refused(capsys, MODEL, "--cpu", "1GiB") == "vllm-overlay: run `python tools/apply_patches.py --installed`"


def test_a_package_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr("vllm_overlay.cli.serve.entry_points", lambda **wanted: [])
    assert f"install this package with `{sys.executable} -m pip install .`" in refused(capsys, MODEL, "--cpu", "1GiB")


@pytest.mark.parametrize(
    ("given", "has"), [("", "vllm_overlay"), ("theirs", "theirs,vllm_overlay"), ("vllm_overlay,a", "vllm_overlay,a")]
)
def test_a_list_of_plug_ins_gets_ours(monkeypatch, capsys, given, has):
    monkeypatch.setenv("VLLM_PLUGINS", given)
    command_of(MODEL, "--cpu", "8GiB")
    assert os.environ["VLLM_PLUGINS"] == has
    assert shlex.split(capsys.readouterr().err.splitlines()[-1])[0] == f"VLLM_PLUGINS={has}"


def test_its_help_teaches(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "vllm-overlay serve /models/Qwen3.5-35B-A3B --cpu 32GiB --disk /var/cache/vllm-kv:1TiB --port 8000" in shown


def works(process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_while_it_plans_and_leaves_no_process(tiny_model, number, status):
    """Sent to it alone, as a container's runtime does."""
    asking = subprocess.Popen(
        [sys.executable, "-m", "vllm_overlay", "serve", str(tiny_model), "--cpu", "64MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = psutil.Process(asking.pid).children
    until(lambda: bool(children()), "the process that is asked")
    asked = children()
    asking.send_signal(number)
    out, said = asking.communicate(timeout=PATIENCE_S)
    assert (asking.returncode, out) == (status, ""), said
    assert "Traceback" not in said
    until(lambda: not any(map(works, asked)), "the end of the process that was asked")
