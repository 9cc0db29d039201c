# SPDX-License-Identifier: Apache-2.0
"""``make demo``: a table and status 0 when every restore is right, a sentence and status 1 when one is not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.damage import flip
from tests.http.demo_process import DemoProcess
from tests.tiers.disk.files import object_files
from tools import demo
from tools.demo import Demo, Geometry, Row, restorable_tokens
from vllm_overlay.server.api_client import Completion

RESTORABLE = restorable_tokens(demo.DEFAULT_PROMPT_TOKENS)


@pytest.mark.engine
@pytest.mark.processor
@pytest.mark.usefixtures("rank_in_the_core")
def test_the_demo_restores_from_cpu_then_from_disk_and_leaves_nothing(demo_directory: Path) -> None:
    with DemoProcess(demo_directory) as process:
        status = process.finish()
        assert status == 0, process.output
        rows = [line.split("│") for line in process.output.splitlines() if line.startswith("│")]
        cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
        restored, source, verdict = 2, 5, 6
        assert [row[restored] for row in cells] == ["0", str(RESTORABLE), str(RESTORABLE)]
        assert [row[source] for row in cells] == ["-", "cpu", "disk"]
        assert [row[verdict] for row in cells] == ["(is the cold run)", *2 * ["tokens and logprobs"]]
        process.assert_nothing_left()
    assert not (demo_directory / "run").exists()


@pytest.mark.faults
@pytest.mark.engine
def test_the_demo_fails_when_what_lies_on_disk_is_damaged_between_the_servers(
    demo_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    second_life = Demo.second_life

    def after_damage(self: Demo) -> list[Row]:
        objects = object_files(self.root)
        assert objects
        flip(objects)
        return second_life(self)

    monkeypatch.setattr(Demo, "second_life", after_damage)
    assert demo.main(["--directory", str(demo_directory)]) == 1
    output = capsys.readouterr()
    assert f"'again, new server' restored 0 tokens and not {RESTORABLE}" in output.err
    # The damage cost time and nothing else.
    assert "differs" not in output.err
    assert not (demo_directory / "run").exists()


GEOMETRY = Geometry(token_bytes=256.0, state_bytes=300_000.0)


def good_rows() -> list[Row]:
    """What a right run shows."""
    num_bytes = 256 * RESTORABLE + 300_000
    sizes = {"cpu": GEOMETRY, "disk": GEOMETRY}
    cold = Completion([1, 2], [-0.5, -1.0], demo.DEFAULT_PROMPT_TOKENS, 0, 1.0)
    warm = replace(cold, num_cached_tokens=RESTORABLE)
    return [
        Row("cold", "", cold, {"cpu": 0, "disk": 0}, sizes),
        Row("again", "cpu", warm, {"cpu": num_bytes, "disk": 0}, sizes),
        Row("new server", "disk", warm, {"cpu": 0, "disk": num_bytes}, sizes),
    ]


@pytest.fixture
def judge(demo_directory: Path) -> Demo:
    return Demo(demo_directory, demo.DEFAULT_PROMPT_TOKENS, None)


def test_right_rows_have_no_fault(judge: Demo) -> None:
    assert judge.faults(good_rows()) == []


def _with_completion(**changes: object) -> Callable[[Row], Row]:
    return lambda row: replace(row, completion=replace(row.completion, **changes))


@pytest.mark.parametrize(
    ("position", "change", "words"),
    [
        (1, _with_completion(token_ids=[1, 3]), "the output of 'again' differs from the cold run's: token 2 is 3 "),
        (2, _with_completion(logprobs=[-0.5, -1.0000001]), "token 2 is 2 (logprob -1.0000001) and not 2 (-1.0)"),
        (2, _with_completion(logprobs=[-0.5, float("nan")]), "the output of 'new server' differs"),
        (1, _with_completion(token_ids=[1], logprobs=[-0.5]), "1 tokens and not 2"),
        (1, _with_completion(num_cached_tokens=RESTORABLE - 64), f"restored {RESTORABLE - 64} tokens"),
        (0, _with_completion(num_cached_tokens=64), "'cold' restored 64 tokens and not 0"),
        (1, lambda row: replace(row, loaded_bytes={"cpu": 0, "disk": 0}), "the workers loaded nothing"),
        (1, lambda row: replace(row, loaded_bytes={"cpu": 0, "disk": row.loaded_bytes["cpu"]}), "loaded {'disk'"),
        (2, lambda row: replace(row, loaded_bytes={"disk": row.loaded_bytes["disk"] - 1}), "loaded {'disk'"),
        (1, lambda row: replace(row, geometries={"cpu": replace(GEOMETRY, state_bytes=1.0)}), "loaded {'cpu'"),
        (1, lambda row: replace(row, geometries={}, loaded_bytes={"cpu": 0}), "of 'cpu' are not both above 0"),
        (
            2,
            lambda row: replace(
                row, geometries={"disk": Geometry(256.0, 0.0)}, loaded_bytes={"disk": 256 * RESTORABLE}
            ),
            "of 'disk' are not both above 0",
        ),
    ],
)
def test_each_fault_gets_its_sentence(judge: Demo, position: int, change: Callable[[Row], Row], words: str) -> None:
    rows = good_rows()
    rows[position] = change(rows[position])
    (fault,) = judge.faults(rows)
    assert words in fault


@pytest.mark.parametrize(
    "arguments", [["--prompt-tokens", "64"], ["--prompt-tokens", "x"], ["--prompt-tokens", "9000"]]
)
def test_a_prompt_that_cannot_work_is_refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        demo.main(arguments)
    assert refusal.value.code == 2
    assert "is not a number from 65 to" in capsys.readouterr().err


def test_two_demos_do_not_share_a_directory(demo_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with demo.one_at_a_time(demo_directory):
        assert demo.main(["--directory", str(demo_directory)]) == 1
    assert "another demo runs in" in capsys.readouterr().err


def test_the_prompt_has_as_many_bytes_as_it_says() -> None:
    assert len(demo.make_prompt(3981).encode()) == 3981
    assert demo.make_prompt(3981) == demo.make_prompt(3981)
