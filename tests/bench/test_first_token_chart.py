# SPDX-License-Identifier: Apache-2.0
"""The chart of first tokens: its table, its picture, and that it refuses a figure from the wrong source."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import first_token_chart
from bench.first_token_chart import COLUMNS, Bench, WrongSourceError, caption, main, picture, rows, summaries
from bench.measure import table
from vllm_overlay.server.api_client import Completion, Metrics

PROMPTS = [(2.0, 0.5, 1.0), (4.0, 0.4, 0.8), (3.0, 0.6, 0.9)]
"""Seconds of three prompts from each source."""


def test_ratios_are_of_each_prompt_to_its_own_cold_run() -> None:
    assert [list(row) for row in rows(summaries(PROMPTS))] == [
        ["cold", "3000 ms", "1.000", "1.000 to 1.000"],
        ["from the CPU tier", "500 ms", "0.200", "0.150 to 0.225"],
        ["from the disk tier", "900 ms", "0.300", "0.250 to 0.400"],
    ]
    assert "| from the disk tier | 900 ms " in table(COLUMNS, rows(summaries(PROMPTS)))


def test_the_picture_has_a_bar_for_each_median_and_says_what_was_measured(tmp_path: Path) -> None:
    figure = picture(summaries(PROMPTS), caption(4013, 3))
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1.0, 0.2, 0.3])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cold", "from the CPU tier", "from the disk tier"]
    assert [text.get_text() for text in axes.texts] == ["1.00  (3000 ms)", "0.20  (500 ms)", "0.30  (900 ms)"]
    said = figure.get_supxlabel()
    for words in ("3 prompts of 4,013 tokens", "Tiny hybrid model with random weights", "CPU cores and no GPU"):
        assert words in said
    figure.savefig(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


class FakeApi:
    """A server that loads from the source that the control file leaves, or from ``always``."""

    def __init__(self, control_file: Path, always: str = "", cached: int | None = None) -> None:
        self._control_file = control_file
        self._always = always
        self._cached = cached
        self._seen = False
        self._loaded = {"cpu": 0, "disk": 0}
        self.resets = 0

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def wait_for_stores(self) -> None: ...

    def settled_metrics(self) -> Metrics:
        name = "vllm:hybrid_offload_loaded_bytes"
        samples = [f'{name}_total{{connector="{key}"}} {value}' for key, value in self._loaded.items()]
        return Metrics("\n".join([f"# TYPE {name} counter", *samples, ""]))

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        cached = 0
        if self._seen:
            switches = json.loads(self._control_file.read_text())
            self._loaded[self._always or ("cpu" if switches["cpu"]["load"] else "disk")] += 100
            cached = self._cached if self._cached is not None else (len(prompt) - 1) // 64 * 64
        self._seen = True
        return Completion([1], [-0.5], len(prompt), cached, 0.25)


@pytest.fixture
def control_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(first_token_chart, "LOOK_EVERY_S", 0.0)
    return tmp_path / "control.json"


def test_a_prompt_is_asked_cold_then_from_each_tier_with_an_empty_device_cache(control_file: Path) -> None:
    api = FakeApi(control_file)
    assert Bench(api, control_file).ask(range(200)) == (0.25, 0.25, 0.25)
    assert api.resets == 3


@pytest.mark.parametrize(
    ("always", "cached", "words"),
    [
        ("disk", None, "from the CPU tier: 192 tokens were cached, where 192 should be, and who loaded is disk"),
        ("cpu", None, "from the disk tier: 192 tokens were cached, where 192 should be, and who loaded is cpu"),
        ("", 128, "from the CPU tier: 128 tokens were cached, where 192 should be"),
    ],
)
def test_a_figure_from_another_source_is_refused(control_file: Path, always: str, cached: int, words: str) -> None:
    with pytest.raises(WrongSourceError, match=words):
        Bench(FakeApi(control_file, always, cached), control_file).ask(range(200))


def test_a_second_cold_run_of_one_prompt_is_refused(control_file: Path) -> None:
    bench = Bench(FakeApi(control_file), control_file)
    bench.ask(range(200))
    with pytest.raises(
        WrongSourceError, match="cold: 192 tokens were cached, where 0 should be, and who loaded is cpu"
    ):
        bench.ask(range(200))


@pytest.mark.parametrize("arguments", [["--prompts", "1"], ["--prompt-tokens", "64"], ["--prompt-tokens", "8129"]])
def test_a_prompt_that_cannot_be_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "of 65 to 8128 tokens" in capsys.readouterr().err
