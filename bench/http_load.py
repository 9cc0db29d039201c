# SPDX-License-Identifier: Apache-2.0
"""Requests over HTTP that come when they come, whether or not the server keeps up, and what each of them saw."""

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console

from bench.measure import percentile
from bench.scaled_trace import ScaledRequest
from bench.trace import TraceError
from tools.process_group import ENDING_SIGNALS
from tools.server_process import ServerError
from vllm_overlay.server.api_client import ApiClient, ApiError


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request. ``first_token_s`` counts from when it was due; ``ended_s`` from the start of the part."""

    first_token_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """What came of one part of a run. ``seconds``: until the last answer. ``errors``: of requests that failed."""

    served: tuple[Served, ...]
    errors: tuple[str, ...]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Of prompts and answers."""
        return sum(one.prompt_tokens + one.answer_tokens for one in self.served)

    def first_token_s(self, share: float) -> float:
        """Seconds until this share of the requests that were answered had their first token. There must be one."""
        return percentile([one.first_token_s for one in self.served], share)


def play(api: ApiClient, requests: Sequence[ScaledRequest], answered: Callable[[], object] = lambda: None) -> Part:
    """Sends each request at its time and waits for all answers; ``answered`` is called after each, in any thread.

    An interruption is raised at once: requests under way end when their server does.
    """
    pool = ThreadPoolExecutor(len(requests), thread_name_prefix="request")
    begin = time.monotonic()
    futures: list[Future[Served | str]] = []
    try:
        for request in requests:
            time.sleep(max(0.0, begin + request.arrival_s - time.monotonic()))
            futures.append(pool.submit(_send, api, request, begin, answered))
        results = [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    served = tuple(one for one in results if isinstance(one, Served))
    errors = tuple(one for one in results if isinstance(one, str))
    return Part(served, errors, time.monotonic() - begin)


def _send(api: ApiClient, request: ScaledRequest, begin: float, answered: Callable[[], object]) -> Served | str:
    late_s = time.monotonic() - begin - request.arrival_s
    try:
        answer = api.complete(request.prompt, request.max_tokens)
    except ApiError as error:
        return f"{type(error).__name__}: {error}"
    answered()
    return Served(
        late_s + answer.seconds_to_first_token,
        time.monotonic() - begin,
        answer.num_prompt_tokens,
        answer.num_cached_tokens,
        len(answer.token_ids),
    )


def status_of(program: Callable[[Console], int]) -> int:
    """Runs it with a console for what is no result. Returns its exit status: 0 or 1; 130 at Ctrl-C."""
    console = Console(stderr=True)
    try:
        return min(program(console), 1)
    except (TraceError, ServerError, ApiError, RuntimeError, OSError) as error:
        console.print(f"failed: {error}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: nothing is left running")
        return 130


def interrupt_at_ending_signals() -> None:
    """So that servers are ended at SIGTERM too."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.default_int_handler)
