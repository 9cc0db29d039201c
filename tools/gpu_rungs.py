# SPDX-License-Identifier: Apache-2.0
"""What each rung of tools/gpu_smoke.py does, in a process of its own: raises, or returns what it found.

A rung with an engine runs ``LLM`` within this process, so that the tier's bytes can be reached.
"""

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEAR = 0.05
"""Of a logprob: more is another answer."""
NUM_REQUESTS = 50
CPU_TIER = {
    "kv_connector": "HybridOffloadConnector",
    "kv_role": "kv_both",
    # A number, because "auto" loads nothing that is faster to compute, as a tiny model's prompts may be.
    "kv_connector_extra_config": {"tier": "cpu", "capacity_bytes": "1 GiB", "load_weight": 1.0},
}
CONNECTOR = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": "vllm_overlay.multi_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [CPU_TIER]},
}
CAREFUL = {"enforce_eager": True, "attention_backend": "TRITON_ATTN", "gdn_prefill_backend": "triton"}
"""The kernels that are the nearest to those of the CPU build."""
FLASH = {**CAREFUL, "attention_backend": "FLASH_ATTN"}

Answer = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class Rung:
    """``run`` takes the directory of the model and the device. ``why_not_cpu`` is empty if it means something there."""

    title: str
    run: Callable[[Path, str], str]
    why_not_cpu: str = ""


class Engine:
    """vLLM on the tiny model, in this process."""

    def __init__(self, model: Path, device: str, **arguments: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        from vllm import LLM

        arguments.setdefault("async_scheduling", False)  # one cause less; the rung "asynchronous" asks for it
        if device == "cpu":
            for name in ("attention_backend", "gdn_prefill_backend"):
                arguments.pop(name, None)
            arguments["enforce_eager"] = True
        else:
            arguments.setdefault("gpu_memory_utilization", 0.3)
        self._llm = LLM(
            str(model), max_model_len=8192, enable_prefix_caching=True, mamba_ssm_cache_dtype="float32", **arguments
        )

    @property
    def block_size(self) -> int:
        """N, the unified block size that vLLM has found."""
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    @property
    def scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def answers(self, prompts: list[list[int]], num_tokens: int = 8) -> tuple[list[Answer], list[int]]:
        """To each prompt, greedily: tokens and their logprobs; and how much of each prompt was cached."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
        answers = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            chosen = zip(tokens, output.outputs[0].logprobs, strict=True)
            logprobs = [candidates[token].logprob for token, candidates in chosen]
            if len(tokens) != num_tokens or not all(map(math.isfinite, logprobs)):
                raise AssertionError(f"an answer of {len(tokens)} tokens with logprobs {logprobs}")
            answers.append((tokens, logprobs))
        return answers, [output.num_cached_tokens or 0 for output in outputs]

    def evict(self) -> None:
        """The tiers keep what they have; the device cache loses everything."""
        connector = self.scheduler.connector
        while connector is not None and connector.has_pending_push_work():
            self._llm.llm_engine.step()
        while not self._llm.reset_prefix_cache():
            self._llm.llm_engine.step()

    def zero_states(self) -> None:
        """The snapshots in the CPU tier become zeros."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from vllm_overlay.planner.objects import SNAPSHOT_TAG

        entries = self.scheduler.connector.sub_connectors[0]._scheduler._tier.index._entries
        rows = get_kv_transfer_group().sub_connectors[0]._worker._tier._pool.array
        snapshots = [entry for entry in entries.values() if entry.object_id.tag == SNAPSHOT_TAG]
        for entry in snapshots:
            rows[list(entry.units)] = 0
        if not snapshots:
            raise AssertionError("the CPU tier has no snapshot")


def prompt(num_tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(num_tokens)]


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of two answers' logprobs; infinite when their tokens differ."""
    if one[0] != other[0]:
        return math.inf
    return max(abs(mine - theirs) for mine, theirs in zip(one[1], other[1], strict=True))


def restored(model: Path, device: str, *, num_tokens: int = 0, **arguments: Any) -> str:
    """Cold, from the device cache, from the CPU tier, and from the CPU tier with zeros for states."""
    engine = Engine(model, device, kv_transfer_config=CONNECTOR, **arguments)
    # Two blocks are a multiple of the 64 tokens of the GDN kernels, also where one block is not.
    tokens = prompt(num_tokens or 2 * engine.block_size + 20, seed=1)
    (cold,), _ = engine.answers([tokens])
    (hit,), _ = engine.answers([tokens])
    engine.evict()
    (again,), (num_cached,) = engine.answers([tokens])
    found = {"device cache": difference(cold, hit), "CPU tier": difference(cold, again)}
    if not num_cached:
        raise AssertionError("nothing was restored")
    if max(found.values()) > NEAR:
        raise AssertionError(f"logprobs differ from the cold run's: {found}")
    engine.evict()
    engine.zero_states()
    (wrong,), _ = engine.answers([tokens])
    if difference(cold, wrong) <= NEAR:
        raise AssertionError("zeros for states change nothing: this comparison would miss a wrong restore")
    said = ", ".join(f"{name} {'exact' if far == 0 else f'{far:.1e} off'}" for name, far in found.items())
    return f"{num_cached} of {len(tokens)} tokens restored (N = {engine.block_size}); {said}; zeroed states differ"


def operators(_: Path, device: str) -> str:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    both = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    out = torch.empty(4, 32, device=device, dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(out, both)
    wanted = torch.nn.functional.silu(both[:, :32].float()) * both[:, 32:].float()
    torch.testing.assert_close(out.float(), wanted, atol=0.05, rtol=0.02)
    if device == "cuda" and not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        raise AssertionError("swap_blocks_batch is not there")
    return "vLLM's compiled operators load, and silu_and_mul is right"


def platform(_: Path, device: str) -> str:
    import torch
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        raise AssertionError(f"vLLM's platform is {current_platform.device_type!r}")
    capability = current_platform.get_device_capability()
    return f"vLLM {vllm.__version__}, torch {torch.__version__}, {current_platform.get_device_name()}, {capability}"


def plain(model: Path, device: str) -> str:
    engine = Engine(model, device, **CAREFUL)
    tokens = prompt(2 * engine.block_size + 20, seed=1)
    (cold,), _ = engine.answers([tokens])
    (hit,), (num_cached,) = engine.answers([tokens])
    far = difference(cold, hit)
    if not num_cached or far > NEAR:
        raise AssertionError(f"{num_cached} tokens hit in the device cache, logprobs {far} off")
    return f"{num_cached} of {len(tokens)} tokens hit in the device cache (N = {engine.block_size}), {far:.1e} off"


def at_once(model: Path, device: str) -> str:
    engine = Engine(model, device, kv_transfer_config=CONNECTOR, async_scheduling=True, max_num_seqs=16, **FLASH)
    if (kind := type(engine.scheduler).__name__) != "AsyncScheduler":
        raise AssertionError(f"vLLM's scheduler is a {kind}")
    prompts = [prompt(300, number % 5) + prompt(100 + 50 * number, 10 + number) for number in range(NUM_REQUESTS)]
    first, _ = engine.answers(prompts)
    engine.evict()
    again, num_cached = engine.answers(prompts)
    if not any(num_cached):
        raise AssertionError("nothing was restored")
    same = sum(one[0] == other[0] for one, other in zip(first, again, strict=True))
    if same < 0.8 * NUM_REQUESTS:  # batches round, and near-ties fall otherwise
        raise AssertionError(f"only {same} of {NUM_REQUESTS} answers have the same tokens")
    return f"{same} of {NUM_REQUESTS} answers have the same tokens, {sum(map(bool, num_cached))} were restored"


def unit_of_64(model: Path, device: str) -> str:
    return restored(model, device, num_tokens=700, block_size=1088, prefix_match_unit=64, **CAREFUL)


GRAPHS = {**FLASH, "enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL"}}

RUNGS = {
    "operators": Rung("the compiled operators load and compute", operators),
    "platform": Rung("vLLM sees the device", platform),
    "plain": Rung("a tiny Qwen3.5 without our connector, eager, TRITON_ATTN, GDN prefill by Triton", plain),
    "connector": Rung(
        "with our connector: cold, evicted, restored, and with zeroed states",
        lambda model, device: restored(model, device, **CAREFUL),
    ),
    "flash": Rung(
        "the same with FLASH_ATTN",
        lambda model, device: restored(model, device, **FLASH),
        why_not_cpu="the CPU platform has one attention backend",
    ),
    "asynchronous": Rung(
        f"asynchronous scheduling, {NUM_REQUESTS} requests at once",
        at_once,
        why_not_cpu="the CPU platform switches asynchronous scheduling off",
    ),
    "graphs": Rung(
        "FULL CUDA graphs",
        lambda model, device: restored(model, device, **GRAPHS),
        why_not_cpu="the CPU platform has no graphs",
    ),
    "unit": Rung("--block-size 1088 --prefix-match-unit 64", unit_of_64),
}
