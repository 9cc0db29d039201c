# SPDX-License-Identifier: Apache-2.0
"""How long requests wait for their first output token, and where most of their prompt came from."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_overlay.metrics import Source
from vllm_overlay.tally import Tally

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Prompt:
    request: "Request"
    num_local: int
    num_loaded: int = 0
    has_others: bool = False
    source: Source | None = None

    def begin(self) -> None:
        """The first step computes with what was loaded: ``num_computed_tokens`` are not advanced yet."""
        found = self.request.num_computed_tokens
        rest = max(0, found - self.num_local - self.num_loaded)
        tokens = {
            Source.TIER: self.num_loaded,
            Source.DEVICE: self.num_local + (0 if self.has_others else rest),
            Source.OTHER: rest if self.has_others else 0,
            Source.COMPUTED: self.request.num_prompt_tokens - found,
        }
        self.source = max(tokens, key=tokens.__getitem__)


class FirstTokens:
    """Called by the scheduler's half alone. A first token is seen at the next step, or when its request ends."""

    def __init__(self, tally: Tally, clock: Callable[[], float] = time.time) -> None:
        """``clock`` is that of ``Request.arrival_time``: wall-clock time."""
        self._tally = tally
        self._clock = clock
        self._new: dict[str, _Prompt] = {}
        """Requests that were in no step yet. A preempted request is new again."""
        self._computing: dict[str, _Prompt] = {}
        """Requests whose first output token was not seen yet."""

    def looked_up(self, request: "Request", num_local: int) -> None:
        """A request waits for its admission: for the first time, again, or after a preemption."""
        self.finished(request.request_id)
        if not request.num_output_tokens:
            self._new[request.request_id] = _Prompt(request, num_local)

    def loaded(self, request_id: str, num_tokens: int) -> None:
        """This connector has loaded so many tokens of the request; with 0, another connector has loaded some."""
        if (prompt := self._new.get(request_id)) is not None:
            prompt.num_loaded = num_tokens
            prompt.has_others = not num_tokens

    def step(self, scheduled: Iterable[str]) -> None:
        """Called before a step that computes these requests."""
        if self._computing:
            out = [name for name, prompt in self._computing.items() if prompt.request.num_output_tokens]
            for request_id in out:
                self._observe(self._computing.pop(request_id))
        for request_id in scheduled if self._new else ():
            if (prompt := self._new.pop(request_id, None)) is not None:
                prompt.begin()
                self._computing[request_id] = prompt

    def finished(self, request_id: str) -> None:
        """The request is over. One that ends without an output token is not counted."""
        self._new.pop(request_id, None)
        prompt = self._computing.pop(request_id, None)
        if prompt is not None and prompt.request.num_output_tokens:
            self._observe(prompt)

    def _observe(self, prompt: _Prompt) -> None:
        assert prompt.source is not None
        seconds = max(0.0, self._clock() - prompt.request.arrival_time)
        self._tally.observe("first_token_seconds", seconds, label=prompt.source)
