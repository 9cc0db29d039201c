# SPDX-License-Identifier: Apache-2.0
"""What the tests of features ask of an engine beyond ``generate``. Run inside the driver's process, like faults.py."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.request import RequestStatus

from tests.engine.faults import disk_delays, disk_works
from tests.engine.halves import scheduler_half
from tests.models.qwen3_5_vl import TOKEN_PIXELS
from tests.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from tests.engine.driver import Driver

_numbers = itertools.count()


def answers(
    driver: "Driver", tokens: list[int], salt: str = "", images: Sequence[int] = (), **sampling: Any
) -> dict[str, Any]:
    """All that one request answers: of each of its completions, and of the prompt when ``prompt_logprobs`` asks.

    ``images`` are seeds of pictures, one for each place of an image in the prompt.
    """
    item = {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
    if images:
        item["multi_modal_data"] = {"image": [picture(seed) for seed in images]}
    (output,) = driver.llm.generate([item], parameters(**sampling), use_tqdm=False)
    asked = output.prompt_logprobs
    return {
        "num_cached_tokens": output.num_cached_tokens,
        "prompt": asked and [_ranked(candidates) for candidates in asked],
        "completions": [
            {
                "token_ids": list(each.token_ids),
                "logprobs": [_ranked(candidates) for candidates in each.logprobs],
                "text": each.text,
                "finish_reason": each.finish_reason,
                "stop_reason": each.stop_reason,
            }
            for each in output.outputs
        ],
    }


def parameters(structured_outputs: dict[str, Any] | None = None, **sampling: Any) -> SamplingParams:
    """Greedy, unless ``sampling`` says otherwise."""
    constraint = StructuredOutputsParams(**structured_outputs) if structured_outputs else None
    return SamplingParams(
        **{"temperature": 0, "logprobs": 0, "ignore_eos": True, **sampling}, structured_outputs=constraint
    )


def picture(seed: int) -> Image.Image:
    """Random squares of one token each."""
    squares = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((8 * TOKEN_PIXELS, 8 * TOKEN_PIXELS), Image.Resampling.NEAREST)


def _ranked(candidates: Any) -> list[list[float]] | None:
    return candidates and [[token, item.logprob] for token, item in sorted(candidates.items())]


def num_free_blocks(driver: "Driver") -> int:
    return int(driver.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def abort_in(driver: "Driver", phase: str, tokens: list[int], root: str) -> int:
    """Aborts a request in a phase of its life. Returns how many tokens of it were computed or promised by then.

    While the phase is loading the disk takes for ever, and is well again when the request is gone.
    """
    reached: dict[str, Callable[[Any], bool]] = {
        "waiting": lambda request: request.status == RequestStatus.WAITING,
        "loading": lambda request: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS,
        "prefill": lambda request: 0 < request.num_computed_tokens < request.num_prompt_tokens - 1,
        "decode": lambda request: request.num_output_tokens >= 2,
    }
    if phase == "loading":
        disk_delays(driver, seconds=PATIENCE_S)
    name = f"to-abort-{phase}-{next(_numbers)}"
    parameters = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    name = driver.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
    request = driver.engine_core.scheduler.requests[name]
    _step_until(driver, lambda: reached[phase](request))
    num_computed = int(request.num_computed_tokens)
    driver.llm.llm_engine.abort_request([name], internal=True)
    driver.rest(0.05)
    if phase == "loading":
        disk_works(driver, root)
    driver.wait_for_stores()
    _step_until(driver, lambda: name not in driver.engine_core.scheduler.requests)
    return num_computed


def _step_until(driver: "Driver", is_so: Callable[[], bool]) -> None:
    driver.step_until(is_so, "a request's state")


def preempted(
    driver: "Driver", prompts: list[list[int]], priorities: list[int], max_tokens: int
) -> list[dict[str, Any]]:
    """Requests that come a few steps apart, each with its priority; and how often each was preempted."""
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    engine, found = driver.llm.llm_engine, {}
    requests: dict[str, Any] = {}
    names = [f"priority-{next(_numbers)}" for _ in prompts]
    for name, tokens, priority in zip(names, prompts, priorities, strict=True):
        internal = engine.add_request(name, {"prompt_token_ids": tokens}, parameters, priority=priority)
        requests[name] = driver.engine_core.scheduler.requests[internal]
        for _ in range(4):
            found.update({output.request_id: output for output in engine.step() if output.finished})

    def have_ended() -> bool:
        found.update({output.request_id: output for output in engine.step() if output.finished})
        return not engine.has_unfinished_requests()

    until(have_ended, "the end of all requests", longest_pause_s=0.0)
    return [
        {
            "token_ids": list((completion := found[name].outputs[0]).token_ids),
            "logprobs": [
                candidates[token].logprob
                for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True)
            ],
            "num_preemptions": requests[name].num_preemptions,
        }
        for name in names
    ]


def session(driver: "Driver", parts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """A session of streaming input: its prompt comes in parts, each is answered before the next one comes."""
    engine = driver.llm.llm_engine
    parameters = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA
    )
    name = f"session-{next(_numbers)}"
    answered: list[dict[str, Any]] = []
    for tokens in parts:
        _add_part(driver, name, tokens, parameters, is_last=False)
        said: dict[str, Any] = {"token_ids": [], "logprobs": []}

        def is_answered(said: dict[str, Any] = said) -> bool:
            for output in engine.step():
                completion = output.outputs[0]
                said["token_ids"] += completion.token_ids
                said["logprobs"] += [
                    candidates[token].logprob
                    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True)
                ]
                said["num_cached_tokens"] = output.num_cached_tokens
            return len(said["token_ids"]) >= max_tokens

        until(is_answered, f"an answer to the session's part {len(answered) + 1}", longest_pause_s=0.0)
        answered.append(said)
        driver.rest(0.02)
    _add_part(driver, name, [0], parameters, is_last=True)
    _step_until(driver, lambda: not engine.has_unfinished_requests())
    return answered


def _add_part(driver: "Driver", name: str, tokens: list[int], parameters: SamplingParams, is_last: bool) -> None:
    """What vLLM's asynchronous engine does with a part; the synchronous one has no call for it."""
    engine = driver.llm.llm_engine
    request = engine.input_processor.process_inputs(
        name,
        {"prompt_token_ids": tokens},
        parameters.clone(),
        supported_tasks=engine.get_supported_tasks(),
        resumable=not is_last,
    )
    request.external_req_id = name
    engine.output_processor.add_request(request, None, None, 0)
    engine.engine_core.add_request(copy.deepcopy(request))  # both extend the list of its tokens


def mode(driver: "Driver") -> dict[str, Any]:
    """What the engine has made of its settings."""
    config = driver.llm.llm_engine.vllm_config
    return {
        "cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "compilation_mode": int(config.compilation_config.mode or 0),
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "policy": config.scheduler_config.policy,
        "scheduler": type(driver.engine_core.scheduler).__name__,
        "num_concurrent_batches": driver.engine_core.batch_queue_size,
        "uses_v2_runner": config.use_v2_model_runner,
        "connector": type(driver.engine_core.scheduler.connector).__name__,
    }


def only_disk_loads(driver: "Driver", on: bool) -> bool:
    """The CPU tier offers nothing meanwhile."""
    half = scheduler_half(driver, "cpu")
    half._loads_resume_at = float("inf") if on else 0.0
    return on
