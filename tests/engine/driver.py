# SPDX-License-Identifier: Apache-2.0
"""The engine's side of tests/engine/client.py: ``python -m tests.engine.driver '{"model": ...}'``."""

import itertools
import json
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from tests.engine import interpreted_triton

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    interpreted_triton.install()

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.reader import Histogram

from tests.engine import asynchronous, drafts, faults, features
from tests.engine.forcing import FORCED
from tests.waiting import until

STATE_S = 10.0
"""So long a rank of several may take to say what it is in: a test may have made it hang."""


class Driver:
    """Operations on one LLM; every public method can be called by name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        if arguments.get("async_scheduling"):
            asynchronous.force()
        if arguments.get("speculative_config"):
            drafts.watch()
        self.llm = LLM(**arguments)
        self._num_aborted = itertools.count()
        faults.wait_for_recovery(self)

    @property
    def engine_core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salts: list[str] | None = None,
        adapter: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        parameters = features.parameters(max_tokens=max_tokens, **sampling)
        answers = []
        inputs = _inputs(prompts, salts)
        lora_request = LoRARequest(**adapter) if adapter is not None else None
        for output in self.llm.generate(inputs, parameters, use_tqdm=False, lora_request=lora_request):
            completion = output.outputs[0]
            chosen = zip(completion.token_ids, completion.logprobs, strict=True)
            answers.append(
                {
                    "token_ids": list(completion.token_ids),
                    "logprobs": [candidates[token].logprob for token, candidates in chosen],
                    "num_cached_tokens": output.num_cached_tokens,
                }
            )
        return answers

    def abort_after(
        self, prompts: list[list[int]], max_tokens: int, num_steps: int, salts: list[str] | None = None
    ) -> bool:
        """Starts requests and aborts them so many steps later, as far as they are not done."""
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        names = [f"to-abort-{next(self._num_aborted)}" for _ in prompts]
        for name, item in zip(names, _inputs(prompts, salts), strict=True):
            self.llm.llm_engine.add_request(name, item, parameters)
        for _ in range(num_steps):
            self._step()
        self.llm.llm_engine.abort_request(names)
        self._step()
        return True

    def forced_logprobs(self, prompt: list[int], output: list[int]) -> list[list[float]]:
        """For each token of ``output`` when it is forced: its logprob, and the best one at its place."""
        parameters = SamplingParams(
            temperature=0, max_tokens=len(output), logprobs=1, ignore_eos=True, extra_args={FORCED: output}
        )
        completion = self.llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)[0].outputs[0]
        assert list(completion.token_ids) == output
        return [
            [candidates[token].logprob, max(item.logprob for item in candidates.values())]
            for token, candidates in zip(output, completion.logprobs, strict=True)
        ]

    def drafts(self) -> list[list[tuple[int, list[int]]]]:
        """``drafts.take``."""
        return drafts.take()

    def load_adapter(self, adapter: dict[str, Any], in_place: bool = False) -> bool:
        """Loads it ahead of its requests, as vLLM's server does."""
        return bool(self.llm.llm_engine.add_lora(LoRARequest(**adapter, load_inplace=in_place)))

    def reset(self) -> bool:
        self.step_until(self.llm.reset_prefix_cache, "the end of all holds on blocks of the device cache")
        return True

    def reset_everything(self) -> bool:
        """Empties the device prefix cache and the external tiers."""
        self.wait_for_stores()
        return self.reset() and bool(self.llm.reset_prefix_cache(reset_connector=True))

    def wait_for_stores(self) -> bool:
        """A connector hears of a request's end in the step after it, and may store, or rank what it has, only then."""
        scheduler = self.engine_core.scheduler
        self.step_until(
            lambda: not scheduler.finished_req_ids and not scheduler.connector.has_pending_push_work(),
            "the end of all stores",
        )
        return True

    def step_until(self, is_so: Callable[[], bool], what: str) -> None:
        """As ``until``; the engine steps meanwhile."""
        until(lambda: is_so() or self._step(), what, longest_pause_s=0.0)

    def max_load_attempts(self) -> int:
        """After so many failed loads vLLM's scheduler computes a request, whatever is offered (patch 0004)."""
        return int(self.engine_core.scheduler.max_load_attempts)

    def rest(self, seconds: float) -> float:
        """Lets background threads work, and steps, for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._step()
        return seconds

    def _step(self) -> None:
        self.llm.llm_engine.step()
        time.sleep(0.001)

    def metric(self, name: str, labels: dict[str, str]) -> float:
        self._step()
        total = 0.0
        for metric in self.llm.get_metrics():
            if metric.name == name and labels.items() <= metric.labels.items():
                total += metric.count if isinstance(metric, Histogram) else metric.value
        return total

    def state(self) -> list[dict[str, Any]]:
        """Of each rank: what its answers rest on beside its requests. None of it may change while an engine lives."""
        found: list[dict[str, Any]] = self.engine_core.model_executor.collective_rpc(_state, timeout=STATE_S)
        return found

    def fault(self, name: str, **arguments: Any) -> Any:
        return getattr(faults, name)(self, **arguments)

    def feature(self, name: str, **arguments: Any) -> Any:
        """One of features.py."""
        return getattr(features, name)(self, **arguments)

    def fault_in_rank(self, rank: int, name: str, **arguments: Any) -> Any:
        """A fault of what one of several ranks has in its own process."""
        answers = self.engine_core.model_executor.collective_rpc(_fault_in_rank, args=(rank, name, arguments))
        return answers[rank]


def _state(worker: Any) -> dict[str, Any]:
    """Called in every rank's process. Buffers are, above all, the tables of rotary embeddings."""
    model = worker.model_runner.model
    return {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "l2_cache_bytes": torch.cpu.get_capabilities()["l2_cache_size"],
        "weights": _digest(model.named_parameters()),
        "buffers": _digest(model.named_buffers()),
    }


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = 0
    for _, tensor in sorted(tensors):
        digest = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(), digest)
    return f"{digest:08x}"


def _fault_in_rank(worker: Any, rank: int, name: str, arguments: dict[str, Any]) -> Any:
    """Called in every rank's process."""
    return getattr(faults, name)(None, **arguments) if worker.rank == rank else None


def _inputs(prompts: list[list[int]], salts: list[str] | None) -> list[dict[str, Any]]:
    """As vLLM takes them; an empty salt is none."""
    salted = salts if salts is not None else [""] * len(prompts)
    return [
        {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
        for tokens, salt in zip(prompts, salted, strict=True)
    ]


def _serve(driver: Driver) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("operation")
        try:
            answer = {"result": getattr(driver, operation)(**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print("ANSWER " + json.dumps(answer), flush=True)


def main() -> None:
    """Build the engine, say so, serve until standard input ends."""
    driver = Driver(json.loads(sys.argv[1]))
    print("ANSWER " + json.dumps({"result": "ready"}), flush=True)
    _serve(driver)
    driver.engine_core.shutdown()


if __name__ == "__main__":
    main()
