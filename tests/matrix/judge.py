# SPDX-License-Identifier: Apache-2.0
"""Compares answers with those of engines that have no connector."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.engine.client import Engine, Output
from tests.matrix.cells import Cell, Verdict
from tests.matrix.rows import UNIT


class Judge:
    """One model's. Its two engines are started when they are first asked, and closed with ``engines``."""

    def __init__(self, model: Path, arguments: dict[str, Any], engines: ExitStack) -> None:
        self._model = model
        self._arguments = arguments
        self._plain = {**arguments, "enable_prefix_caching": False, "prefix_match_unit": None}
        self._engines = engines
        self._uncached: Engine | None = None
        self._device_cached: Engine | None = None

    def verdict(self, tokens: list[int], answer: Output, num_restorable: int, restored_before: int = 0) -> Cell:
        """``num_restorable``: of the prompt, so many tokens had to come from a cache. ``restored_before``: so many had
        come from there when the rest of what was found was computed, which kernels may round by."""
        if answer.num_cached_tokens < num_restorable:
            return Cell(Verdict.NO_HIT, f"{answer.num_cached_tokens} of {num_restorable} tokens")
        computed = self._without_cache(tokens)
        if answer.same_as(computed):
            return Cell(Verdict.EXACT)
        by_device = self._with_device_cache(tokens, restored_before, answer.num_cached_tokens)
        if by_device.num_cached_tokens < answer.num_cached_tokens:  # whole blocks alone, where there is no state
            by_device = self._in_steps_of(answer.num_cached_tokens, tokens)
        if answer.same_as(by_device):
            return Cell(Verdict.AS_DEVICE, "vLLM's kernels round by where a prefill begins")
        return Cell(Verdict.WRONG, f"{answer} instead of {computed}, or of {by_device}")

    def _without_cache(self, tokens: list[int]) -> Output:
        if self._uncached is None:
            self._uncached = self._engines.enter_context(Engine(self._model, **self._plain))
        return self._uncached.generate(tokens)

    def _in_steps_of(self, num_tokens: int, tokens: list[int]) -> Output:
        with Engine(self._model, **self._plain, max_num_batched_tokens=num_tokens) as engine:
            return engine.generate(tokens)

    def _with_device_cache(self, tokens: list[int], *boundaries: int) -> Output:
        """Computed up to each of these, then from the last one."""
        if self._device_cached is None:
            self._device_cached = self._engines.enter_context(Engine(self._model, **self._arguments))
        self._device_cached.reset_device_cache()
        for boundary in filter(None, boundaries):
            self._device_cached.generate(tokens[: boundary + dropped(self._arguments) + 1])
        return self._device_cached.generate(tokens)


def dropped(arguments: dict[str, Any]) -> int:
    """Tokens that vLLM drops from the end of each hit, because a drafter reads ahead."""
    return UNIT if "speculative_config" in arguments else 0


def restorable(num_tokens: int, arguments: dict[str, Any]) -> int:
    """Of a prompt that was sent before."""
    ahead = dropped(arguments)
    return (num_tokens - (0 if ahead else 1)) // UNIT * UNIT - ahead
