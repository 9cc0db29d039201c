# SPDX-License-Identifier: Apache-2.0
"""With speculative decoding a restored prompt gives the answer, the logprobs and the drafts of a computed one."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import oracle
from tests.engine.binding import BINDING
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.interpreted_triton import V2_RUNNER
from tests.engine.random_workload import DRAFTERS
from tests.engine.states import FLOAT32
from tests.models.eagle import make_head
from tests.models.families import make_llama
from tools.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine
suite = pytest.mark.engines

N = FLOAT32.block_size
U = 64
ANSWER = 12
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
EAGLE3: dict[str, Any] = {"method": "eagle3", "num_speculative_tokens": 2}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
ASYNCHRONOUS = {**V2_RUNNER, "async_scheduling": True}
WITHOUT_STATES = {"block_size": U}
TWO_RANKS: dict[str, Any] = {"environment": BINDING, "tensor_parallel_size": 2}
CASES = [
    pytest.param(MTP, {}, id="mtp-V1"),
    pytest.param(MTP, V2_RUNNER, id="mtp-V2", marks=suite),
    pytest.param(MTP, ASYNCHRONOUS, id="mtp-V2, asynchronous", marks=suite),
    pytest.param(MTP, TWO_RANKS, id="mtp-two ranks", marks=suite),
    pytest.param({**EAGLE3, "model": 1}, {}, id="eagle3 in a group of its own-V1"),
    pytest.param({**EAGLE3, "model": 1}, ASYNCHRONOUS, id="eagle3 in a group of its own-V2, asynchronous", marks=suite),
    pytest.param({**EAGLE3, "model": 4}, TWO_RANKS, id="eagle3 in a group of its own-two ranks", marks=suite),
    pytest.param({**EAGLE3, "model": 2}, {}, id="eagle3-V1", marks=suite),
    pytest.param({**EAGLE3, "model": 2}, V2_RUNNER, id="eagle3-V2", marks=suite),
    pytest.param({**EAGLE3, "model": 2}, ASYNCHRONOUS, id="eagle3-V2, asynchronous", marks=suite),
    pytest.param({**EAGLE3, "method": "eagle", "model": 2}, {}, id="eagle-V1", marks=suite),
    pytest.param({**EAGLE3, "method": "eagle", "model": 2}, ASYNCHRONOUS, id="eagle-V2, asynchronous", marks=suite),
    pytest.param(NGRAM, {}, id="ngram-V1", marks=suite),  # on V2 its kernels need Triton, and its interpreter fails
]
"""``model``: how many heads of keys a head of EAGLE has. The model's own attention has 2."""


@pytest.fixture(scope="module")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a module of multi-token prediction."""
    return make_tiny_model(tmp_path_factory.mktemp("mtp") / "model", has_draft_head=True)


def with_head(speculation: dict[str, Any], directory: Path, seed: int = 0) -> dict[str, Any]:
    """As vLLM takes it."""
    if "model" not in speculation:
        return speculation
    head = make_head(directory / f"head-{seed}", speculation["method"], num_kv_heads=speculation["model"], seed=seed)
    return {**speculation, "model": str(head)}


@dataclass(frozen=True)
class Asked:
    """An answer; its drafts, each with how many tokens were known then (V1); and how many drafts were accepted."""

    output: Output
    drafts: list[tuple[int, list[int]]]
    num_accepted: float

    def same_as(self, cold: "Asked") -> bool:
        """From the last part of the prompt on: the V2 runner drafts after each part."""
        last = -min(len(self.drafts), len(cold.drafts))
        same_drafts = self.drafts[last:] == cold.drafts[last:]
        return self.output.same_as(cold.output) and same_drafts and self.num_accepted == cold.num_accepted

    @property
    def accepted(self) -> list[tuple[int, int]]:
        """How many tokens were known before each of these steps, and how many of its drafts were accepted."""
        known = [known for known, _ in self.drafts]
        return [(before, after - before - 1) for before, after in itertools.pairwise(known)]


def ask(engine: Engine, tokens: list[int], max_tokens: int = ANSWER) -> Asked:
    engine.call("drafts")
    before = engine.metric("vllm:spec_decode_num_accepted_tokens")
    output = engine.generate(tokens, max_tokens)
    accepted = engine.metric("vllm:spec_decode_num_accepted_tokens") - before
    (drafts,) = engine.call("drafts")
    return Asked(output, drafts, accepted)


def restorable(num_tokens: int, speculation: dict[str, Any]) -> int:
    """A drafter that keeps keys reads ahead, and costs each hit a match unit."""
    return max(0, num_tokens // U - 1) * U if speculation["method"] != "ngram" else (num_tokens - 1) // U * U


@pytest.mark.parametrize(("speculation", "runner"), CASES)
def test_answers_and_drafts_are_those_that_were_computed(
    mtp_model: Path, tmp_path: Path, speculation: dict[str, Any], runner: dict[str, Any]
) -> None:
    check_all_restores(mtp_model, tmp_path, speculation, {**FLOAT32.arguments, **runner}, is_quick=runner == {})


@suite
@pytest.mark.parametrize("speculation", [NGRAM, {**EAGLE3, "model": 2}], ids=["ngram", "eagle3"])
def test_of_a_model_without_states_too(tmp_path: Path, speculation: dict[str, Any]) -> None:
    check_all_restores(make_llama(tmp_path / "llama"), tmp_path, speculation, WITHOUT_STATES, is_quick=True)


def check_all_restores(
    model: Path, tmp_path: Path, speculation: dict[str, Any], engine_arguments: dict[str, Any], is_quick: bool
) -> None:
    """From the device, from the CPU tier, and from disk after a restart. Answers run over a block's end."""
    lengths = (3 * U + 2, N - 5, 2 * N + U, *((U + 2, 2 * U - 1, 2 * U, N, N + 2) if is_quick else ()))
    arguments = {**engine_arguments, "speculative_config": with_head(speculation, tmp_path)}
    tiers = multi(cpu_child(), disk_child(tmp_path / "root"))
    prompts = {length: prompt(length, seed=length) for length in lengths}
    cold: dict[int, Asked] = {}

    def check(engine: Engine, length: int) -> None:
        restored = ask(engine, prompts[length])
        assert restored.output.num_cached_tokens == restorable(length, speculation)
        assert restored.same_as(cold[length]), (length, cold[length], restored)

    with Engine(model, **arguments, kv_transfer_config=tiers) as engine:
        for length, tokens in prompts.items():
            cold[length] = ask(engine, tokens)
            assert cold[length].output.num_cached_tokens == 0
            check(engine, length)
            engine.evict()
            check(engine, length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
        assert engine.metric("vllm:hybrid_offload_hook_errors") == 0
        engine.wait_for_stores()
    with Engine(model, **arguments, kv_transfer_config=tiers) as engine:
        for length in lengths:
            check(engine, length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
    if is_quick and "model" in speculation:
        arguments["speculative_config"] = with_head(speculation, tmp_path, seed=1)
        with Engine(model, **arguments, kv_transfer_config=tiers) as engine:
            assert engine.generate(prompts[lengths[0]]).num_cached_tokens == 0  # of another head


@pytest.mark.parametrize(
    ("speculation", "kind"),
    [(MTP, "f0"), pytest.param({**EAGLE3, "model": 1}, "f1", marks=suite)],
    ids=["mtp", "eagle3 in a group of its own"],
)
def test_without_the_drafters_part_of_chunks_only_the_drafts_differ(
    mtp_model: Path, tmp_path: Path, speculation: dict[str, Any], kind: str
) -> None:
    """So the comparison of drafts can fail."""
    arguments = {**FLOAT32.arguments, "speculative_config": with_head(speculation, tmp_path)}
    tokens = prompt(2 * N + 10, seed=1)
    with Engine(mtp_model, **arguments, kv_transfer_config=multi(cpu_child())) as engine:
        cold = ask(engine, tokens)
        engine.evict()
        engine.call("fault", name="zero_second_half", kind=kind)
        restored = ask(engine, tokens)
    assert restored.output.num_cached_tokens == restorable(len(tokens), speculation)
    assert restored.output.token_ids == cold.output.token_ids
    assert not restored.same_as(cold)


@pytest.mark.engines
@pytest.mark.parametrize("at", [0, 1])
def test_prompts_that_part_at_a_restore_point_have_drafts_of_their_own(mtp_model: Path, at: int) -> None:
    """The drafter's last key before that point is of the token behind it. vLLM alone computes the sibling in the same
    steps when it keeps a state there: with others a draft may round to another."""
    arguments = {**FLOAT32.arguments, "speculative_config": MTP}
    first = prompt(N + 3 * U, seed=2)
    shared = restorable(len(first), MTP) + at
    sibling = first[:shared] + prompt(2 * U, seed=3)
    with Engine(mtp_model, **arguments, enable_mamba_shared_prefix_checkpoint=True) as plain:
        ask(plain, first)
        computed = ask(plain, sibling)
    assert computed.output.num_cached_tokens == 0
    with Engine(mtp_model, **arguments, kv_transfer_config=multi(cpu_child())) as engine:
        ask(engine, first)
        engine.evict()
        for _ in range(2):
            answer = ask(engine, sibling)
            assert answer.same_as(computed)
            engine.evict()
    assert answer.output.num_cached_tokens > shared - U


# A drafter that knows the answers, and is right in none, some or all of its drafts. Decoded tokens are stored.

NUM_DRAFTS = 5
PROMPTS = [prompt(N - end, seed) for end, seed in ((1, 21), (2, 22), (6, 6))]
"""They end so many tokens before a block does."""
LONG_ANSWER = 40
TURN = prompt(N - 30, seed=5)


@pytest.fixture(scope="module")
def knowing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that keeps the state at each block's end, in answers too."""
    arguments = {**FLOAT32.arguments, "prefix_cache_retention_interval": N}
    tiers = multi(cpu_child(store_decoded_tokens=True))
    with knowing_engine(tiny_model, tmp_path_factory.mktemp("oracle"), **arguments, kv_transfer_config=tiers) as engine:
        yield engine


@contextmanager
def knowing_engine(model: Path, directory: Path, **arguments: Any) -> Iterator[Engine]:
    """What it knows lies in the directory."""
    known = directory / "known.json"
    is_new = not known.exists()
    speculation = {**DRAFTERS["oracle"], "num_speculative_tokens": NUM_DRAFTS}
    if is_new:
        known.write_text("[]")
    with Engine(model, {oracle.KNOWN: str(known)}, speculative_config=speculation, **arguments) as engine:
        for tokens in (TURN, *PROMPTS) if is_new else ():
            learn(engine, tokens, known)
        yield engine


def learn(engine: Engine, tokens: list[int], known: Path) -> None:
    """Steps of several tokens round otherwise than those of one. So an answer with drafts may part from what is known
    of it, and is known from there on by the next time."""
    others, answer = json.loads(known.read_text()), tokens
    for _ in range(LONG_ANSWER):
        engine.call("reset_everything")
        before, answer = answer, tokens + engine.generate(tokens, LONG_ANSWER).token_ids
        if answer == before:
            return
        known.write_text(json.dumps([*others, answer]))
    pytest.fail("no answer stays the same")


def test_a_step_may_pass_a_blocks_end_with_no_some_or_all_drafts_accepted(knowing: Engine) -> None:
    accepted = set()
    for tokens in PROMPTS:
        knowing.call("reset_everything")
        cold = ask(knowing, tokens, LONG_ANSWER)
        accepted |= {number for known, number in cold.accepted if known <= N < known + 1 + number}
        knowing.evict()
        restored = ask(knowing, tokens, LONG_ANSWER)
        assert restored.output.num_cached_tokens == (len(tokens) - 1) // U * U
        assert restored.same_as(cold)
    assert 0 in accepted and max(accepted) > 0


def next_turn(engine: Engine) -> list[int]:
    answer = ask(engine, TURN, LONG_ANSWER)
    assert any(number for _, number in answer.accepted)
    return TURN + answer.output.token_ids + prompt(5, seed=6)


def test_a_state_that_decoding_has_passed_is_that_of_accepted_tokens(knowing: Engine) -> None:
    tokens = next_turn(knowing)
    by_device = knowing.generate(tokens)
    knowing.evict()
    restored = knowing.generate(tokens)
    assert by_device.num_cached_tokens == restored.num_cached_tokens == N
    assert restored.same_as(by_device)


def test_the_state_of_a_rejected_draft_would_be_seen(knowing: Engine) -> None:
    knowing.call("reset_everything")
    knowing.call("fault", name="set_state_of_a_draft_stored", on=True)
    try:
        tokens = next_turn(knowing)
        by_device = knowing.generate(tokens)
        knowing.evict()
    finally:
        knowing.call("fault", name="set_state_of_a_draft_stored", on=False)
    restored = knowing.generate(tokens)
    assert restored.num_cached_tokens == N
    assert not restored.same_as(by_device)


@suite
def test_without_states_chunks_of_an_answer_are_of_accepted_tokens(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "llama")
    with knowing_engine(model, tmp_path, **WITHOUT_STATES, kv_transfer_config=multi(cpu_child())):
        pass  # it has learned, and resets its tiers for that
    tiers = multi(cpu_child(store_decoded_tokens=True), disk_child(tmp_path / "root", store_decoded_tokens=True))
    with knowing_engine(model, tmp_path, **WITHOUT_STATES, kv_transfer_config=tiers) as engine:
        tokens = next_turn(engine)
        by_device = engine.generate(tokens)
        engine.evict()
        restored = engine.generate(tokens)
        engine.wait_for_stores()
    with knowing_engine(model, tmp_path, **WITHOUT_STATES, kv_transfer_config=tiers) as engine:
        by_disk = engine.generate(tokens)
    for answer in (by_device, restored, by_disk):
        assert answer.num_cached_tokens == N > len(TURN)
        assert answer.same_as(by_device)
