# SPDX-License-Identifier: Apache-2.0
"""The ladder for a machine with a GPU, on the rungs that a CPU has, and what it says of rungs that do not pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S
from tools import gpu_bundle, gpu_smoke
from tools.gpu_rungs import RUNGS, Rung
from tools.gpu_smoke import Outcome, Verdict, climb, exit_status, main, run_within
from vllm_overlay.config import ConfigError


@pytest.mark.engines
@pytest.mark.engine
def test_the_ladder_on_a_cpu(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    rungs = ["operators", "connector", "flash"]
    assert main([*rungs, "--device", "cpu", "--model", str(tiny_model), "--json", str(found)]) == 0
    outcomes = json.loads(found.read_text())["rungs"]
    assert [(one["rung"], one["verdict"]) for one in outcomes] == [
        ("operators", "passed"),
        ("connector", "passed"),
        ("flash", "skipped"),
    ]
    assert "restored twice, equal; 0 from the cold run" in outcomes[1]["said"]
    assert "zeros for states: other tokens" in outcomes[1]["said"]
    assert "connector     passed" in capsys.readouterr().out


@pytest.mark.engines
@pytest.mark.engine
@pytest.mark.parametrize("name", ["below", "restart"])
def test_what_people_with_gpus_are_to_take_comes_first(tiny_model: Path, name: str) -> None:
    outcome = climb(name, tiny_model, "cpu", timeout_s=PATIENCE_S)
    assert outcome.verdict is Verdict.PASSED, outcome.said
    assert ("after a restart passed" if name == "restart" else "flipped files: computed") in outcome.said


def test_what_a_file_has_is_not_run_again_and_a_spent_budget_leaves_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    climbed: list[str] = []

    def climb_once(name: str, model: Path, device: str, timeout_s: float, log_path: Path) -> Outcome:
        climbed.append(name)
        if len(climbed) == 2:  # the machine is taken away
            raise KeyboardInterrupt
        return Outcome(name, Verdict.PASSED, 1.0, "fine")

    monkeypatch.setattr(gpu_smoke, "climb", climb_once)
    arguments = ["--device", "cpu", "--model", str(tmp_path), "--json", str(tmp_path / "found.json")]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert climbed == list(RUNGS)[:2]
    assert main([*arguments, "--budget", "1"]) == 3
    assert f"{list(RUNGS)[1]}: " in capsys.readouterr().out
    assert climbed == list(RUNGS)[:2]
    assert main(arguments) == 0
    assert climbed == [*list(RUNGS)[:2], *list(RUNGS)[1:]]


def test_the_disk_tier_without_encryption_needs_no_package_for_it(tmp_path: Path) -> None:
    """A machine with a GPU and without an index may lack it."""
    code = "import sys; import vllm_overlay.tiers.disk.worker; assert 'cryptography' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.engine
def test_a_rung_that_fails_says_why_and_one_that_takes_too_long_is_killed(tiny_model: Path) -> None:
    failed = climb("platform", tiny_model, "cuda", timeout_s=PATIENCE_S)
    assert (failed.verdict, failed.said) == (Verdict.FAILED, "AssertionError: vLLM's platform is 'cpu'")
    late = climb("platform", tiny_model, "cpu", timeout_s=0.01)
    assert (late.verdict, "after 0 s" in late.said) == (Verdict.TIMED_OUT, True)


def refused(*_: object) -> str:
    try:
        raise ConfigError("use the CPU build of vLLM")
    except ConfigError as error:
        raise RuntimeError("the engine does not start") from error


def broken(*_: object) -> str:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (refused, ["refused", "use the CPU build of vLLM"]),
        (broken, ["failed", "RuntimeError: no kernel"]),
        (lambda *_: "fine", ["passed", "fine"]),
    ],
)
def test_a_refusal_of_our_connector_is_told_from_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: object, said: list[str]
) -> None:
    monkeypatch.setitem(RUNGS, "mine", Rung("mine", run))  # type: ignore[arg-type]
    monkeypatch.setattr(os, "_exit", lambda status: None)
    run_within("mine", Path(), "cpu")
    (result,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT ")]
    assert json.loads(result.removeprefix("RESULT ")) == said


def test_the_exit_status_says_the_worst() -> None:
    def status(*verdicts: Verdict) -> int:
        return exit_status([Outcome("rung", verdict, 1.0, "") for verdict in verdicts])

    assert status(Verdict.PASSED, Verdict.SKIPPED) == 0
    assert status(Verdict.PASSED, Verdict.REFUSED) == 3
    assert status(Verdict.REFUSED, Verdict.FAILED) == status(Verdict.TIMED_OUT) == 1


def test_a_rung_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["hyperspace"])
    assert ended.value.code == 2
    assert "no rung is called hyperspace" in capsys.readouterr().err


def test_the_bundle_takes_what_the_ladder_needs() -> None:
    taken = {name for name in NAMES if gpu_bundle.is_needed(name)}
    assert taken == {"vllm/engine/core.py", "vllm/_C_stable_libtorch.abi3.so", "vllm/cumem_allocator.abi3.so"}
    files = {str(path) for path in gpu_bundle.project_files()}
    assert {"tools/gpu_smoke.py", "tools/tiny_model.py", "patches/series", "vllm_overlay/versions.py"} <= files


NAMES = [
    "vllm/engine/core.py",
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/third_party/deep_gemm/include/a.hpp",
    "vllm/vllm-rs",
]
