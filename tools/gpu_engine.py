# SPDX-License-Identifier: Apache-2.0
"""vLLM on the tiny model within this process, so that a tier's bytes can be reached: what rungs ask."""

import math
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CAREFUL = {"enforce_eager": True, "attention_backend": "TRITON_ATTN", "gdn_prefill_backend": "triton"}
"""The kernels that are the nearest to those of the CPU build."""
FLASH = {**CAREFUL, "attention_backend": "FLASH_ATTN"}

Answer = tuple[list[int], list[float]]


def environment() -> dict[str, str]:
    """Of every engine."""
    repository = str(Path(__file__).resolve().parent.parent)
    return {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")])),
    }


def on(device: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As far as the device has them. A CPU has one backend and no graphs. A GPU is not taken whole, and its memory not
    profiled, so that ladders may climb beside each other."""
    if device == "cpu":
        not_there = ("attention_backend", "gdn_prefill_backend")
        return {**{name: value for name, value in arguments.items() if name not in not_there}, "enforce_eager": True}
    return {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30, **arguments}


class Engine:
    """vLLM on the tiny model, in this process."""

    def __init__(self, model: Path, device: str, **arguments: Any) -> None:
        os.environ.update(environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        from vllm import LLM

        arguments.setdefault("async_scheduling", False)  # one cause less; the rung "asynchronous" asks for it
        common = {"max_model_len": 8192, "enable_prefix_caching": True, "mamba_ssm_cache_dtype": "float32"}
        self._llm = LLM(str(model), **{**common, **on(device, arguments)})
        self._wait_as_a_server_does()
        self.adapter: Any = None
        """The ``LoRARequest`` of each request."""
        self.image: Any = None
        """The picture of each prompt."""

    def _wait_as_a_server_does(self) -> None:
        """A step that computes nothing leaves Python to other threads for a while, as in ``EngineCoreProc``. vLLM's
        engine within a process does not, and threads that read wait 5 ms for each call that they make."""
        core = self._llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def step_and_wait() -> tuple[Any, bool]:
            outputs, is_executed = step()
            if not is_executed and core.scheduler.has_requests():
                time.sleep(0.001)
            return outputs, is_executed

        core.step_fn = step_and_wait

    def close(self) -> None:
        """The tiers write what they have yet to write."""
        self._llm.llm_engine.engine_core.shutdown()

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
        more = {"multi_modal_data": {"image": [self.image]}} if self.image else {}
        items = [{"prompt_token_ids": tokens, **more} for tokens in prompts]
        outputs = self._llm.generate(items, sampling, use_tqdm=False, lora_request=self.adapter)
        answers = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            chosen = zip(tokens, output.outputs[0].logprobs, strict=True)
            logprobs = [candidates[token].logprob for token, candidates in chosen]
            if len(tokens) != num_tokens or not all(map(math.isfinite, logprobs)):
                raise AssertionError(f"an answer of {len(tokens)} tokens with logprobs {logprobs}")
            answers.append((tokens, logprobs))
        return answers, [output.num_cached_tokens or 0 for output in outputs]

    def regret(self, tokens: list[int], answer: list[int]) -> float:
        """By how much a token's logprob in this answer is below the best one's, at most: computed alone, from nothing
        that is cached."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        (output,) = self._llm.generate([{"prompt_token_ids": tokens + answer}], sampling, use_tqdm=False)
        candidates = output.prompt_logprobs[len(tokens) :]
        each = zip(answer, candidates, strict=True)
        return max(max(one.logprob for one in ranked.values()) - ranked[token].logprob for token, ranked in each)

    def evict(self) -> None:
        """The tiers keep what they have; the device cache loses everything."""
        connector = self.scheduler.connector
        while connector is not None and connector.has_pending_push_work():
            self._llm.llm_engine.step()
        while not self._llm.reset_prefix_cache():
            self._llm.llm_engine.step()

    def zero_states(self) -> str:
        """The snapshots in the CPU tier become zeros; where there are none, all that it has. Says which."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from vllm_overlay.planner.objects import SNAPSHOT_TAG

        entries = self.scheduler.connector.sub_connectors[0]._scheduler._tier.index._entries
        rows = get_kv_transfer_group().sub_connectors[0]._worker._tier._pool.array
        snapshots = [entry for entry in entries.values() if entry.object_id.tag == SNAPSHOT_TAG]
        for entry in snapshots or entries.values():
            rows[list(entry.units)] = 0
        return "zeros for states" if snapshots else "zeros for chunks"

    def zero_rows(self) -> None:
        """All that vLLM's own CPU tier has becomes zeros."""
        connector = self.scheduler.connector
        (connector,) = getattr(connector, "sub_connectors", None) or [connector]
        (tier,) = connector.connector_scheduler.manager.secondary_tiers
        tier._worker._rows[:] = 0


def prompt(num_tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(num_tokens)]


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of two answers' logprobs; infinite when their tokens differ."""
    if one[0] != other[0]:
        return math.inf
    return max(abs(mine - theirs) for mine, theirs in zip(one[1], other[1], strict=True))
