# SPDX-License-Identifier: Apache-2.0
"""Features of requests that meet the cache: the answer is that of the cold run, and what can be restored is.

One request is in a batch at a time, so that equal means equal to the last bit. docs/models.md lists them all.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.bar import PLAIN, distance
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored, restorable
from tests.engine.states import FLOAT32

pytestmark = pytest.mark.engine

N = FLOAT32.block_size
LENGTH = N + 150
FAR = 0.2
"""How far decode steps and prefills of the same tokens may be from each other, in logprobs."""

Start = Callable[[], Engine]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features") / "root"


@pytest.fixture(scope="module")
def start(tiny_model: Path, root: Path) -> Start:
    """Makes an engine with both tiers."""
    config = multi(cpu_child(), disk_child(root))
    return lambda: Engine(tiny_model, **FLOAT32.arguments, max_num_seqs=1, kv_transfer_config=config)


@pytest.fixture(scope="module")
def engine(start: Start) -> Iterator[Engine]:
    with start() as running:
        yield running


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    """vLLM without a connector, which computes in the same steps. It judges."""
    with Engine(tiny_model, **FLOAT32.arguments, **PLAIN, max_num_seqs=1) as running:
        yield running


def answers(engine: Engine, tokens: list[int], **sampling: Any) -> dict[str, Any]:
    answer: dict[str, Any] = engine.call("feature", name="answers", tokens=tokens, **sampling)
    return answer


def computed(plain: Engine, tokens: list[int], **sampling: Any) -> dict[str, Any]:
    """What vLLM answers when it has nothing of the prompt."""
    plain.reset_device_cache()
    return answers(plain, tokens, **sampling)


def pending(engine: Engine) -> dict[str, float]:
    return {
        name: engine.metric(f"vllm:hybrid_offload_{name}")
        for name in ("pending_loads", "pending_stores", "hook_errors")
    }


def equal_up_to_a_tie(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal tokens and logprobs up to the first tie: ``top_k`` 1 draws among tokens of the very same logprob."""
    for mine, theirs in zip(one["logprobs"], other["logprobs"], strict=True):
        (token, logprob), (their_token, their_logprob) = mine[0], theirs[0]
        if logprob != their_logprob:
            return False
        if token != their_token:
            return True
    return True


def test_several_answers_of_one_restored_prompt(engine: Engine, plain: Engine) -> None:
    """``n``: the first restores, the others take what it has restored from the device cache.

    They all say the same: a seed, which would tell them apart, kills vLLM's engine on a CPU (docs/models.md).
    """
    tokens, sampling = prompt(LENGTH, seed=1), {"n": 3, "temperature": 1.0, "top_k": 1, "max_tokens": 6}
    cold = answers(engine, tokens, **sampling)
    engine.evict()
    restored = answers(engine, tokens, **sampling)
    right = computed(plain, tokens, **sampling)
    assert len(cold["completions"]) == 3
    for one, restored_one, right_one in zip(
        cold["completions"], restored["completions"], right["completions"], strict=True
    ):
        assert equal_up_to_a_tie(restored_one, one)
        assert equal_up_to_a_tie(right_one, one)
    assert restored["num_cached_tokens"] >= restorable(LENGTH)


def test_prompt_logprobs_are_computed_and_what_they_computed_is_restored_without_them(
    engine: Engine, plain: Engine
) -> None:
    """vLLM reads no cache for such a request, or it could not say them. It stores as any other does."""
    tokens = prompt(LENGTH, seed=2)
    cold = answers(engine, tokens, prompt_logprobs=1, max_tokens=6)
    engine.evict()
    restored = answers(engine, tokens, max_tokens=6)
    assert restored["completions"] == cold["completions"]
    assert restored["num_cached_tokens"] == restorable(LENGTH)
    engine.evict()
    again = answers(engine, tokens, prompt_logprobs=1, max_tokens=6)
    assert again == cold
    assert again["num_cached_tokens"] == 0 and len(again["prompt"]) == LENGTH
    assert cold == computed(plain, tokens, prompt_logprobs=1, max_tokens=6)
    assert pending(engine) == {"pending_loads": 0, "pending_stores": 0, "hook_errors": 0}


def test_a_stop_string_ends_a_restored_answer_where_it_ended_the_cold_one(engine: Engine, plain: Engine) -> None:
    tokens = prompt(LENGTH, seed=3)
    free = answers(engine, tokens, max_tokens=12)["completions"][0]
    stop = free["text"][len(free["text"]) // 2 :][:4]
    engine.evict()
    restored = answers(engine, tokens, stop=[stop], max_tokens=12)
    assert restored["num_cached_tokens"] == restorable(LENGTH)
    (stopped,) = restored["completions"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert restored["completions"] == computed(plain, tokens, stop=[stop], max_tokens=12)["completions"]


@pytest.mark.parametrize(
    "constraint",
    [
        {"choice": ["restored from the disk", "computed once more"]},
        {"regex": "[a-f]{40}"},
        {"json": {"type": "object", "properties": {"tokens": {"type": "integer"}}, "required": ["tokens"]}},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
def test_structured_output_after_a_restore(engine: Engine, plain: Engine, constraint: dict[str, Any]) -> None:
    tokens = prompt(LENGTH, seed=4 + len(str(constraint)))
    sampling = {"structured_outputs": constraint, "max_tokens": 10}
    cold = answers(engine, tokens, **sampling)
    engine.evict()
    restored = answers(engine, tokens, **sampling)
    assert restored["completions"] == cold["completions"] == computed(plain, tokens, **sampling)["completions"]
    assert restored["num_cached_tokens"] == restorable(LENGTH)
    assert restored["completions"] != computed(plain, tokens, max_tokens=10)["completions"]


@pytest.mark.parametrize("phase", ["waiting", "loading", "prefill", "decode"])
def test_an_abort_leaves_no_block_and_no_load_behind(engine: Engine, root: Path, phase: str) -> None:
    length = 3000 if phase == "prefill" else LENGTH  # a prefill of more than a step's budget
    tokens, other = prompt(length, seed=70 + len(phase)), prompt(LENGTH, seed=80 + len(phase))
    cold = engine.generate(other)
    stored = engine.generate(tokens) if phase == "loading" else None
    engine.evict()
    if phase == "loading":
        engine.call("feature", name="only_disk_loads", on=True)
    free = engine.call("feature", name="num_free_blocks")
    num_tokens = engine.call("feature", name="abort_in", phase=phase, tokens=tokens, root=str(root))
    if phase == "loading":
        engine.call("feature", name="only_disk_loads", on=False)
    assert (num_tokens > 0) == (phase != "waiting")
    assert engine.call("feature", name="num_free_blocks") == free
    assert pending(engine) == {"pending_loads": 0, "pending_stores": 0, "hook_errors": 0}
    assert_restored(cold, engine.generate(other), LENGTH)
    if stored is not None:
        assert_restored(stored, engine.generate(tokens), length)
    engine.evict()
    first = engine.generate(tokens)
    engine.evict()
    assert_restored(first, engine.generate(tokens), length)


def test_a_session_of_streaming_input_restores_its_first_part_and_is_right(engine: Engine, plain: Engine) -> None:
    parts = [prompt(LENGTH, seed=91), prompt(90, seed=92), prompt(1200, seed=93)]
    cold = engine.call("feature", name="session", parts=parts, max_tokens=5)
    engine.evict()
    restored = engine.call("feature", name="session", parts=parts, max_tokens=5)
    assert [(each["token_ids"], each["logprobs"]) for each in restored] == [
        (each["token_ids"], each["logprobs"]) for each in cold
    ]
    # A later part begins off the kernels' grid of 64 tokens, and vLLM computes a prompt of it all in other steps.
    heard: list[int] = []
    for part, each in zip(parts, restored, strict=True):
        heard += part
        plain.reset_device_cache()
        assert distance(plain, heard, Output(each["token_ids"], each["logprobs"], 0)) <= FAR
        heard += each["token_ids"][:-1]  # vLLM drops the last one, which nothing was computed for
    assert restored[0]["num_cached_tokens"] == restorable(LENGTH)
    assert pending(engine) == {"pending_loads": 0, "pending_stores": 0, "hook_errors": 0}
    engine.evict()
    # What the session computed of its later parts went on from decoded tokens: no other request may find it.
    whole = parts[0] + restored[0]["token_ids"][:-1] + parts[1]
    plain.reset_device_cache()
    assert engine.generate(whole).same_as(plain.generate(whole))


def test_a_salt_finds_its_own_after_a_restart_and_no_other_does(start: Start, engine: Engine, root: Path) -> None:
    tokens = prompt(LENGTH, seed=95)
    cold = engine.generate(tokens, salts=["mine"])
    engine.wait_for_stores()
    with start() as restarted:
        assert restarted.generate(tokens, salts=["yours"]).num_cached_tokens == 0
        assert restarted.generate(tokens).num_cached_tokens == 0
        restarted.reset_device_cache()
        restored: Output = restarted.generate(tokens, salts=["mine"])
    assert_restored(cold, restored, LENGTH)
