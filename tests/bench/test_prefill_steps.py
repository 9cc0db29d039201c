# SPDX-License-Identifier: Apache-2.0
"""Without a connector first tokens come no later with the series, in scheduler steps; and the program that compares."""

import shutil
from dataclasses import replace

import pytest

from bench import prefill_steps
from bench.open_loop import Point, Result, Run, arrivals
from bench.prefill_steps import Summary, is_within_bar, measure, summarize
from tests.patches.trees import linked_vllm_without

POINTS = [Point(8192, 0.5, 544), Point(2048, 0.5, 1152, 64)]
"""A large budget, where a chunk inside a block behind another prefill can cost a request a step, and a small one."""
SUMMARY = Summary(mean=2.5, p50=2.0, p95=4.0, num_steps=100, use=0.5)


@pytest.fixture
def without(tmp_path):
    """A vLLM with the series, but for the patch that ends chunks inside a block."""
    yield linked_vllm_without("0009-advance-inside-a-block.patch", tmp_path / "without")
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def patched(tmp_path):
    return linked_vllm_without("", tmp_path / "patched")


@pytest.mark.benchmarks
@pytest.mark.slow
def test_first_tokens_come_as_early_as_without_the_patch(without, patched):
    before, after = measure([without, patched], POINTS, seeds=1, requests=300, jobs=2)
    assert [is_within_bar(old, new) for old, new in zip(before, after, strict=True)] == [True, True]


def test_the_same_requests_arrive_whatever_the_blocks_are():
    one = Run(POINTS[0], seed=3, num_requests=200)
    assert arrivals(one) == arrivals(replace(one, point=replace(one.point, block_size=1056, match_unit=48)))
    assert arrivals(one) != arrivals(replace(one, seed=4))


def test_arrivals_use_the_share_of_the_budget_that_the_load_says():
    coming = arrivals(Run(Point(8192, 0.9, 544), seed=0, num_requests=20_000))
    num_tokens = sum(arrival.prompt + arrival.output for arrival in coming)
    assert num_tokens / (coming[-1].time * 8192) == pytest.approx(0.9, rel=0.03)


def test_a_summary_is_of_all_seeds():
    results = [Result([1.0] * 10, 10, 100), Result([3.0] * 10, 30, 300)]
    assert summarize(Point(100, 0.5, 16), results) == Summary(mean=2.0, p50=3.0, p95=3.0, num_steps=40, use=0.1)


@pytest.mark.parametrize("name", ["p50", "p95"])
def test_the_bar_is_one_percent_of_p50_and_p95(name):
    value = getattr(SUMMARY, name)
    assert is_within_bar(SUMMARY, replace(SUMMARY, **{name: value * 1.009}))
    assert not is_within_bar(SUMMARY, replace(SUMMARY, **{name: value * 1.011}))


def test_a_point_beyond_the_bar_fails_the_program(monkeypatch, tmp_path, capsys):
    def measured(trees, points, *_):
        return [[SUMMARY] * len(points), [replace(SUMMARY, p95=5.0)] + [SUMMARY] * (len(points) - 1)]

    monkeypatch.setattr(prefill_steps, "measure", measured)
    monkeypatch.setattr(prefill_steps, "trees", lambda: [tmp_path] * 2)
    assert prefill_steps.main(["--budget", "2048", "--block-size", "1152"]) == 1
    assert "5 of 6 points within the bar" in capsys.readouterr().out
    monkeypatch.setattr(prefill_steps, "measure", lambda trees, points, *_: [[SUMMARY] * len(points)] * 2)
    assert prefill_steps.main(["--load", "0.3"]) == 0


def test_an_unknown_block_size_is_refused_with_those_that_work(capsys):
    with pytest.raises(SystemExit, match="2"):
        prefill_steps.main(["--block-size", "1000"])
    assert "544" in capsys.readouterr().err
